"""Messages of vLLM that are left out of engine logs: each is expected here, and would look like a failure."""

from __future__ import annotations

import json
import logging
import logging.config
from pathlib import Path

LOGGING_CONFIG = Path(__file__).with_name("vllm_logging.json")
"""`VLLM_LOGGING_CONFIG_PATH` of engines: the filter below, in each process of vLLM."""

EXPECTED = {
    "RotaryEmbedding: Failed to load weights": "it has no weights: its table follows from the configuration",
    "ParallelLMHead: Failed to load weights": "it is the embedding's tensor, or compared by checksum after the update",
    "The global random seed is set to": "every request has a seed of its own",
    "This model does not officially support disabling chunked prefill": "needed on a CPU: see engines/cpu/setup.py",
    "Enforce eager set": "rollout.engine.enforce_eager, or a CPU",
    "Inductor compilation was disabled by user settings": "rollout.engine.enforce_eager, or a CPU",
    "Triton is not installed. triton-cpu is expected": "no kernel of a CPU engine needs it",
    "Triton is installed, but doesn't include CPU backend": "no kernel of a CPU engine needs it",
    "Reset SSM cache type to float32": "of layers that no supported model has",
    "[shutdown] Process manager: force killing remaining process": "an engine has nothing to save",
}
"""How a message begins -> why it is expected."""


class Expected(logging.Filter):
    """Passes every record but the expected ones."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(tuple(EXPECTED))


def leave_out_expected() -> None:
    """In this process, before vLLM is imported: it reads `LOGGING_CONFIG` only when an engine is made."""
    print(f"# {len(EXPECTED)} kinds of messages are expected and left out: ctpo_megatron/engines/{Path(__file__).name}")
    logging.config.dictConfig(json.loads(LOGGING_CONFIG.read_text(encoding="utf-8")))
