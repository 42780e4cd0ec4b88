"""Known limits of docs/status.md: the message of each row is the one that a user gets."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctpo_launchers import environment
from ctpo_megatron.config import ConfigError, load_config
from ctpo_megatron.config.model_directory import read_shapes
from tests.support.command import Invoke

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([^|]+) \| (?:`([^`]+)`: )?\"([^\"]+)\" \|", re.MULTILINE)


def key(override: str) -> Callable[[], object]:
    return lambda: load_config(ROOT / "configs" / "quickstart.yaml", [override])


def model(**changed: Any) -> Callable[[], object]:
    raw = json.loads((ROOT / "configs" / "models" / "qwen3_4b.json").read_text(encoding="utf-8"))

    def read() -> object:
        with tempfile.TemporaryDirectory() as folder:
            shape = Path(folder) / "config.json"
            shape.write_text(json.dumps(raw | changed), encoding="utf-8")
            return read_shapes(shape)

    return read


ATTEMPTS = {
    "policy.lora": key("policy.lora={rank: 8}"),
    "objective.kl_coef": key("objective.kl_coef=0.1"),
    "objective.teacher": key("objective.teacher=models/teacher"),
    "sliding_window": model(use_sliding_window=True, sliding_window=4096),
    "rope_type: yarn": model(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "LlavaForConditionalGeneration": model(architectures=["LlavaForConditionalGeneration"]),
    "policy.dtype: fp8": key("policy.dtype=fp8"),
    "quantization_config": model(quantization_config={"quant_method": "awq"}),
    "sandbox.stateful": key("sandbox.stateful=true"),
    "rollout.engine.name": key("rollout.engine.name=sglang"),
    "policy.megatron_bridge": key("policy.megatron_bridge=true"),
}
PAGE = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
LIMITS = PAGE.partition("\n## Known limits\n")[2].partition("\n## ")[0]
TOLD = {attempted: message for _, attempted, message in ROW.findall(LIMITS)}


def test_every_row_is_attempted() -> None:
    assert TOLD.keys() == ATTEMPTS.keys() | {""}


@pytest.mark.parametrize("attempted", ATTEMPTS)
def test_the_message_is_the_one_of_the_page(attempted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ATTEMPTS[attempted]()
    assert TOLD[attempted] in str(refused.value)


def test_a_launch_from_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, invoke: Invoke) -> None:
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path / "launch.txt")
    status, _, err = invoke("launch", "my.yaml", "--nodes", "2", "--no-check")
    assert status == 2 and TOLD[""] in err
