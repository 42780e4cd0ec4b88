"""What vLLM says as if it had failed stays out of engine logs; everything else of it stays in."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.config import EngineConfig
from ctpo_megatron.engines.setup import EXPECTED, engine_setup
from tests.support.deadlines import scaled

SPEAK = """
import logging
from ctpo_megatron.engines.setup import leave_out_expected
leave_out_expected()
if engine_made:  # as an engine and its core process do
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    configure_logging(LoggingConfig())
log = logging.getLogger("vllm.spoken")
log.warning("%s: Failed to load weights", "RotaryEmbedding")
log.warning("%s: Failed to load weights", "QKVParallelLinear")
log.info("too quiet")
"""


@pytest.mark.parametrize("engine_made", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_expected_messages_are_left_out_of_vllms_log(engine_made: bool) -> None:
    environment = os.environ | engine_setup("cpu").environment(EngineConfig())
    program = [sys.executable, "-c", f"engine_made = {engine_made}{SPEAK}"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    assert first.startswith("# 10 kinds of messages are expected and left out")
    (line,) = [line for line in others if "vllm.spoken" in line]
    assert "WARNING vllm.spoken" in line and line.endswith("QKVParallelLinear: Failed to load weights")
    assert "RotaryEmbedding" not in done.stdout + done.stderr


def test_every_expected_message_is_in_vllms_source() -> None:
    """A message that vLLM no longer has would hide nothing, or something else."""
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations  # importing it takes ten CPU-seconds
    named = ("config/vllm.py", "engine/arg_utils.py", "platforms/cpu.py", "triton_utils/importing.py", "v1/utils.py")
    named += ("model_executor/model_loader/reload/layerwise.py",)
    text = " ".join((Path(folder) / name).read_text(encoding="utf-8") for name in named)
    text = " ".join(text.replace('"', " ").replace("\n", " ").split())
    for message in EXPECTED:
        start = message.partition(": ")[2] if message.endswith("weights") else message
        assert start in text, message
