"""What an engine of the installed vLLM computes with after an update is what was sent, and a difference is seen."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.deadlines import scaled
from tests.weights.read_back_engine import CHANGES, MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_is_read_back_as_it_was_sent(model: str) -> None:
    command = [sys.executable, "-m", "tests.weights.read_back_engine", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(300), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["model"], result["wrong"], result["missing"]) == (model, [], [])
    if model == "experts":
        assert result["planted"] == {name: [name] for name in CHANGES}
