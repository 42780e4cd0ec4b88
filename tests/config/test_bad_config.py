"""Wrong configurations: each has one clear message that names the key, its value and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.config import ConfigError, Job, load_with_sources
from ctpo_megatron.preflight import check_extensions, validate

# Overrides, and the beginning of what the checks say of them; tests/config/test_config_check.py has more.
WRONG = [
    (
        "run.resume=true run.overwrite=true",
        "run.resume = true: contradicts run.overwrite: true; switch one of them off",
    ),
    (
        "run.deadline=1",
        "run.deadline = 1.0: is in the past; give seconds since the epoch, such as $(date -d +4hours +%s)",
    ),
    (
        "run.deadline=1795438000123",
        "run.deadline = 1795438000123.0: is decades ahead; give seconds since the epoch, s",
    ),
    (
        "data.train=[openai/gsm8k]",
        'data.train = "openai/gsm8k": no such file; a data set of the Hub first: hf download openai/gsm8k --r',
    ),
    (
        "model.path=Qwen/Qwen3-4B",
        'model.path = "Qwen/Qwen3-4B": no such directory; give a directory in Hugging Face format; a Hub model first',
    ),
    (
        "eval.temperature=0.001",
        "eval.temperature = 0.001: the engine would sample at 0.01 instead; set 0 for greedy decoding, or at ",
    ),
    (
        "rollout.replay=nowhere",
        'rollout.replay = "nowhere": is no run directory (no config.yaml in it); give one, e.g. runs/first',
    ),
    (
        "checkpoint.load=nowhere",
        'checkpoint.load = "nowhere": is no complete checkpoint (no COMPLETE.json in it); give a folder such ',
    ),
]
# Parts that are named by a word.
PARTS = [
    ("rollout.tool_parser=xml", '= "xml": write hermes or fenced, or package.module:Name'),
    (
        "rollout.tools=[calculator]",
        'command line: rollout.tools.0 = "calculator": write python, or package.module:Name',
    ),
    ("rollout.filters=[sometimes]", "sometimes"),
    ("reward.function=exact", "no such part; write math_verify or package.module:Name"),
    ("reward.function=nowhere:Score", "there is no module 'nowhere'"),
    ("tracking.trackers=[wanddb]", "wanddb"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_values(base: Path, overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config, sources = load_with_sources(base, overrides.split())
        validate(config, Job(1), cuda=False, sources=sources)
    assert message in str(caught.value)


@pytest.mark.parametrize(("override", "message"), PARTS)
def test_parts(base: Path, override: str, message: str) -> None:
    config, sources = load_with_sources(base, [override])
    with pytest.raises(ConfigError) as caught:
        check_extensions(config, sources)
    assert message in str(caught.value)
    assert str(caught.value).count(override.partition("=")[0]) == 1
