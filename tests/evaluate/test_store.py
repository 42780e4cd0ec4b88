"""Samples on disk: what a kill at any byte leaves, and directories that hold something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ctpo_megatron.config import ConfigError
from ctpo_megatron.evaluate.samples import Sample
from ctpo_megatron.evaluate.store import SAMPLES_FILE, SampleStore

SETTINGS = {"model": "abc", "eval.temperature": 0.7, "tools": ("python",)}


def sample(prompt: str, index: int, text: str = "so\n\\boxed{é}\u2028") -> Sample:
    calls = ("success", "parse_error")
    return Sample(prompt, "a", index, 0.1 + 0.2, "answer", 12, 9, 2, calls, final_text=text, text=f"print(1)\n{text}")


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    with SampleStore(tmp_path, SETTINGS) as store:
        store.add([sample("p", 1), sample("q", 0)])
        store.add([sample("p", 0)])
    with SampleStore(tmp_path, SETTINGS) as store:
        assert store.played == {"p": {0, 1}, "q": {0}}
        assert store.complete("p", 2) == [sample("p", 0), sample("p", 1)]
        assert store.complete("q", 2) == store.complete("r", 1) == []
        assert store.complete("p", 1) == [sample("p", 0)]  # fewer are asked for than there are


def test_a_line_cut_anywhere_is_played_again(tmp_path: Path) -> None:
    with SampleStore(tmp_path, SETTINGS) as store:
        store.add([sample("p", 0), sample("p", 1)])
    whole = (tmp_path / SAMPLES_FILE).read_bytes()
    first = whole.index(b"\n") + 1
    for end in (first, first + 1, len(whole) - 2, len(whole) - 1):
        (tmp_path / SAMPLES_FILE).write_bytes(whole[:end])
        with SampleStore(tmp_path, SETTINGS) as store:
            assert store.played == {"p": {0}}
            store.add([sample("p", 1)])
        assert (tmp_path / SAMPLES_FILE).read_bytes() == whole


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    SampleStore(tmp_path, SETTINGS).close()
    with pytest.raises(ConfigError, match=r"of eval.temperature 0.7, not 1.0; of model 'abc', not 'def'; give another"):
        SampleStore(tmp_path, SETTINGS | {"model": "def", "eval.temperature": 1.0})
    SampleStore(tmp_path, SETTINGS).close()  # the refusal holds no lock


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    with SampleStore(tmp_path, SETTINGS), pytest.raises(ConfigError, match="another process writes to it"):
        SampleStore(tmp_path, SETTINGS)


def test_what_nobody_judged_is_played_again_by_the_next_call(tmp_path: Path) -> None:
    lost = replace(sample("p", 1), score=None)
    with SampleStore(tmp_path, SETTINGS) as store:
        store.add([sample("p", 0), lost])
        assert store.complete("p", 2) == [sample("p", 0), lost]
    with SampleStore(tmp_path, SETTINGS) as store:
        assert store.played == {"p": {0}}
        store.add([sample("p", 1)])
    with SampleStore(tmp_path, SETTINGS) as store:
        assert store.complete("p", 2) == [sample("p", 0), sample("p", 1)]
