"""Stands for `ctpo train` in a sweep: `python stand_in.py run.root="..." run.name="..." ...`.

It is started often, and imports nothing of ours.

What it does, `script.json` in its folder says, by name: a list with one entry a start. `ok`; `fail`: status 3; `wait`:
until a signal asks it to stop, which it obeys once there is no file `hold`, with status 143 or 130. What happens is
appended to `events.txt`.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

DEADLINE_S = 100


def main(overrides: list[str]) -> int:
    """Own the run directory as a run does, act as told, record the end as a run does."""
    settings = dict(text.split("=", 1) for text in overrides)
    name = json.loads(settings["run.name"])
    run = Path(json.loads(settings["run.root"]), name)
    run.mkdir(parents=True, exist_ok=True)
    lock = (run / "owner.lock").open("w")
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print(f"process {os.getpid()}", file=lock, flush=True)
    count = events().count(f"start {name}")
    happened(f"start {name}")
    happened(f"from {name} {settings.get('sft.from')}")
    todo = json.loads(Path("script.json").read_text()).get(name, [])
    what = todo[count] if count < len(todo) else "ok"
    if what == "wait":
        return wait(name)
    if what == "fail":
        return 3
    steps = int(settings.get("run.steps", 3))
    if steps == 0:
        (run / "sft_model.json").write_text("{}")
    (run / "environment.json").write_text(json.dumps({"version": "1", "finished_steps": steps}))
    happened(f"end {name}")
    return 0


def wait(name: str) -> int:
    """Until a signal; then, for as long as `hold` is there, save."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    happened(f"waiting {name} {os.getpid()}")
    until = time.monotonic() + DEADLINE_S
    while (not asked or Path("hold").exists()) and time.monotonic() < until:
        time.sleep(0.02)
    happened(f"saved {name}")
    return 128 + asked[0]


def events() -> list[str]:
    """What has happened in this folder."""
    file = Path("events.txt")
    return file.read_text().splitlines() if file.exists() else []


def happened(text: str) -> None:
    """Append to `events.txt`."""
    with Path("events.txt").open("a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
