"""Data and runs that programs of the model could read are refused before a run, with key, folder and remedy."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.checks import validate, validate_sampling
from ctpo_megatron.config import Config, ConfigError, Job
from ctpo_megatron.config.rollout_rules import check_programs
from ctpo_sandbox.isolation.readable import readable_above
from tests.support.minimal import minimal

SITE = Path(sysconfig.get_paths()["purelib"])
LIBRARIES = readable_above(SITE)


def _found(config: Config) -> list[str]:
    return [f"{problem}: {problem.fix}" for problem in check_programs(config, None, Job(1))]


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[Path]:
    """A link to a folder of packages, outside of them."""
    (tmp_path / "data").symlink_to(SITE)
    yield tmp_path / "data"


def test_what_is_elsewhere_is_no_problem(tmp_path: Path) -> None:
    assert _found(minimal()) == []
    beside = str(Path(sys.prefix) / "data" / "train.jsonl")  # programs do not see the folder around `lib`
    assert _found(minimal(data={"train": [beside], "eval": [str(tmp_path)]}, run={"root": sys.prefix})) == []


def test_every_key_is_named_with_its_folder(linked: Path) -> None:
    config = minimal(
        data={"train": [str(SITE / "a" / "train.jsonl"), "b.jsonl"], "eval": [f"{SITE}/numpy/*.py"]},
        sft={"data": [str(linked / "sft.jsonl")], "steps": 1},
        run={"root": str(SITE / "runs")},
    )
    problems = [*check_programs(config, None, Job(1))]
    assert [problem.key for problem in problems] == ["data.train", "data.eval", "sft.data", "run.root"]
    assert [problem.value for problem in problems] == [
        f"{SITE}/a/train.jsonl", f"{SITE}/numpy/*.py", f"{linked}/sft.jsonl", f"{SITE}/runs"
    ]  # fmt: skip
    for line in _found(config):
        assert f"is below {LIBRARIES}, which programs in the sandbox may read" in line
        assert "choose a folder outside of" in line


def test_programs_that_do_not_run_read_nothing() -> None:
    config = minimal(data={"train": [str(SITE / "train.jsonl")]}, rollout={"tools": []})
    assert _found(config) == []


def test_training_and_sampling_refuse() -> None:
    config = minimal(data={"eval": [str(SITE / "numpy")]})
    for check in (lambda: validate(config, Job(1)), lambda: validate_sampling(config, cuda=False)):
        with pytest.raises(ConfigError) as caught:
            check()
        assert f"data.eval = {json.dumps(str(SITE / 'numpy'))}: is below {LIBRARIES}" in str(caught.value)


def test_threads_without_room_are_refused_with_both_keys() -> None:
    (line,) = _found(minimal(sandbox={"threads": 5000}))
    assert line.startswith("sandbox.threads = 5000: memory_mb = 512 has room for the stacks of 2048; lower threads, or")
