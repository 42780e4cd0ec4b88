"""results.json and the page: figures by source, both scorers, and one self-contained file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.files import write_json
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.evaluate.page import write_evaluation_page
from ctpo_megatron.evaluate.results import RESULTS_FILE, ScoreColumn, results, said
from ctpo_megatron.evaluate.samples import Sample, by_problem


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
    assert [said(SAMPLES[7], name) for name in ("strict", "reference", "reward")] == [None, "7", "no idea, 7 perhaps"]
    found = results(SAMPLES, [scorer("strict"), scorer("reference", 1.0)], seed=0)
    assert found["overall"]["reference"]["maj@4"]["value"] == found["overall"]["reference"]["worst@4"]["value"] == 1


def written(directory: Path, scorers: list[ScoreColumn]) -> dict[str, Any]:
    facts = {"model": "runs/x/model", "samples_per_prompt": 4, "temperature": 0.7, "left_out": ["z/9"]}
    found = facts | {"scorers": [each.name for each in scorers]} | results(SAMPLES, scorers, seed=0)
    prompts = [Prompt(id, "a", ({"role": "user", "content": f"What <b>is</b> {id}?"},), "7", ()) for id in BOXES]
    problems = {problem[0].prompt_id: problem for problem in by_problem(SAMPLES)} | {"z/9": []}
    write_json(directory / RESULTS_FILE, found)
    write_evaluation_page(directory, found, prompts, problems, scorers[0])
    return found


def test_the_page_shows_every_column_and_asks_no_server(tmp_path: Path) -> None:
    found = written(tmp_path, [scorer("strict"), scorer("reference", 1.0)])
    assert json.loads((tmp_path / "results.json").read_text()) == found
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//|url\((?!#)|@import""", page)
    assert "default-src 'none'" in page and "prefers-color-scheme:dark" in page
    for text in ("Scorer: strict", "Scorer: reference", "avg@4", "pass@2", "maj@4", "z/9", "(no answer)", "cut off"):
        assert text in page
    assert "What &lt;b&gt;is&lt;/b&gt; p?" in page and "<b>is</b>" not in page  # a question is text
    assert page.count("<figure id=") == 3
    assert page.index("· r</span>") < page.index("· q</span>")  # the hardest first


def test_one_sample_a_prompt_has_no_draws(tmp_path: Path) -> None:
    first = [replace(s) for s in SAMPLES if s.index == 0]
    found = results(first, [scorer("strict")], seed=0)
    assert set(found["overall"]["strict"]) == {"avg@1", "pass@1", "best@1", "worst@1", "maj@1"}
