"""What torchrun starts in tests of the node program, without torch: says where it is, then does what it is told.

The argument `run.name=WORD` is the order: `done` ends, `fail1` fails on rank 1, `wait` waits for a signal and saves.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

RANK = int(os.environ["RANK"])


def _leave(number: int, _frame: FrameType | None) -> None:
    print(f"rank {RANK} saves after {signal.Signals(number).name}", flush=True)
    time.sleep(0.5)
    sys.exit(143)


def main() -> int:
    order = next(text.removeprefix("run.name=") for text in sys.argv if text.startswith("run.name="))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _leave)
    shown = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "RAY_ADDRESS", "RAY_AUTH_MODE")
    print(f"rank {RANK}:", *(f"{name}={os.environ.get(name)}" for name in shown), *sys.argv[2:], flush=True)
    if order == f"fail{RANK}":
        return 7
    while order != "done":
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
