"""results.json: figures by source and both scorers."""

from __future__ import annotations

from typing import Any

import pytest

from ctpo_megatron.evaluate.results import ScoreColumn, results, written_answer
from ctpo_megatron.evaluate.samples import Sample


def sample(source: str, prompt: str, index: int, box: str | None, truth: str = "7") -> Sample:
    final = "no idea, 7 perhaps" if box is None else f"\\boxed{{{box}}}"
    calls = ("success",) if index else ()
    text = f"<tool> {final}"
    return Sample(prompt, source, index, float(box == truth), "answer", 10, 8, 1, calls, final_text=final, text=text)


BOXES = {"p": ["7", "0.5", "1/2", "\\frac12"], "q": ["7", "7", "3", None], "r": ["8", "7", "9", None]}
SAMPLES = [
    sample("b" if prompt == "r" else "a", prompt, index, box)
    for prompt, boxes in BOXES.items()
    for index, box in enumerate(boxes)
]


def scorer(name: str, score: float | None = None) -> ScoreColumn:
    return ScoreColumn(name, {(s.prompt_id, s.index): s.score if score is None else score for s in SAMPLES})


def values(figures: dict[str, Any]) -> dict[str, float]:
    return {name: figure["value"] for name, figure in figures.items()}


def test_figures_are_by_source_and_over_all_problems() -> None:
    found = results(SAMPLES, [scorer("strict")], seed=0)
    assert list(found["sources"]) == ["a", "b"]
    a = values(found["sources"]["a"]["strict"])
    assert (a["avg@4"], a["pass@1"], a["best@4"], a["worst@4"]) == (0.375, 0.375, 1, 0)
    assert a["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2) and a["pass@4"] == 1
    # p: three ways to write one wrong answer win; q: the right one; r: three answers tie, and "no box" is no vote.
    assert a["maj@4"] == 0.5 and found["sources"]["b"]["strict"]["maj@4"]["value"] == pytest.approx(1 / 3)
    overall = found["overall"]
    assert (overall["problems"], overall["samples"]) == (3, 12)
    assert overall["strict"]["avg@4"]["value"] == pytest.approx(4 / 12)
    assert overall["tool_use"] == 0.75 and overall["response_length_mean"] == 10
    for figure in overall["strict"].values():
        assert figure["low"] <= figure["value"] + 1e-12 and figure["value"] <= figure["high"] + 1e-12


def test_the_reference_votes_with_what_it_reads() -> None:
    assert [written_answer(SAMPLES[7], name) for name in ("strict", "reference", "reward")] == [
        None,
        "7",
        "no idea, 7 perhaps",
    ]
    found = results(SAMPLES, [scorer("strict"), scorer("reference", 1.0)], seed=0)
    assert found["overall"]["reference"]["maj@4"]["value"] == found["overall"]["reference"]["worst@4"]["value"] == 1


def test_one_sample_a_prompt_has_no_draws() -> None:
    first = [s for s in SAMPLES if s.index == 0]
    found = results(first, [scorer("strict")], seed=0)
    assert set(found["overall"]["strict"]) == {"avg@1", "pass@1", "best@1", "worst@1", "maj@1"}
