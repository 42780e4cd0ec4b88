"""The page of an evaluation, in the style of a run's report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.base.run_paths import REPORT
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.evaluate.results import ScoreColumn, said
from ctpo_megatron.evaluate.samples import Sample
from ctpo_megatron.report import Axis, Chart, Curve, Figure, bars, curves, cycled, write_page

_PROBLEMS, _TEXT = 200, 4000
"""Limits of the listed problems and of the characters of their texts."""
_CONDUCT = {
    "response_length_mean": ("response tokens", ",.0f"),
    "model_tokens_mean": ("model tokens", ",.0f"),
    "turns_mean": ("turns", ".2f"),
    "tool_use": ("tool use", ".1%"),
    "tool_calls": ("calls per sample", ".2f"),
    "tool_error_rate": ("failed calls", ".1%"),
    "truncated": ("cut off", ".1%"),
    "max_turns": ("out of turns", ".1%"),
}


@dataclass(frozen=True)
class Row:
    """A listed problem. answers: how often each was given, most frequent first."""

    id: str
    source: str
    question: str
    truth: str
    average: float
    answers: list[tuple[str, int]]
    text: str
    ended: str


def write_evaluation_page(
    directory: Path,
    found: Mapping[str, Any],
    prompts: Sequence[Prompt],
    problems: Mapping[str, list[Sample]],
    by: ScoreColumn,
) -> Path:
    """Write `report.html`. found: content of results.json. problems: samples by prompt id. by: scorer to order by."""
    k, overall, groups = found["samples_per_prompt"], found["overall"], _groups(found)
    rows = sorted((_row(p, problems[p.id], by) for p in prompts if problems[p.id]), key=lambda row: row.average)
    charts = _charts(groups, found["scorers"], k, rows)
    return write_page(
        directory / REPORT,
        "evaluation.html.jinja",
        charts,
        title="/".join(Path(found["model"]).resolve().parts[-2:]),
        headline=f"{overall['problems']} problems from {', '.join(found['sources'])}, {k} samples of each "
        f"at temperature {found['temperature']:g}.",
        tiles=list(_tiles(found)),
        accuracy=[_accuracy(scorer, groups, k) for scorer in found["scorers"]],
        figures=[Figure.of(chart) for chart in charts],
        conduct_columns=[label for label, _ in _CONDUCT.values()],
        conduct=[(source, [_cell(figures, name) for name in _CONDUCT]) for source, figures in groups.items()],
        problems=rows[:_PROBLEMS],
        not_shown=max(0, len(rows) - _PROBLEMS),
        left_out=found["left_out"],
        facts=[(name, value) for name, value in found.items() if name not in ("sources", "overall", "left_out")],
    )


def _groups(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by source, and overall if there are several."""
    sources = dict(found["sources"])
    return sources | ({"overall": found["overall"]} if len(sources) > 1 else {})


def _tiles(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    k, overall = found["samples_per_prompt"], found["overall"]
    for scorer in found["scorers"]:
        for name in [f"avg@{k}"] + ([f"pass@{k}", f"maj@{k}"] if k > 1 else []):
            figure = overall[scorer][name]
            yield f"{name}, {scorer}", f"{figure['value']:.1%}", f"{figure['low']:.1%} to {figure['high']:.1%}"
    yield "Tool use", f"{overall['tool_use']:.0%}", "samples with a successful call"
    yield "Cut off", f"{overall['truncated']:.1%}", "ended by the token budget"
    if "no_verdict" in overall:
        yield "No verdict", f"{overall['no_verdict']:,}", "samples that the reward function did not judge"
    yield "Response", f"{overall['response_length_mean']:,.0f}", "tokens on average, tool output included"


def _accuracy(scorer: str, groups: Mapping[str, Any], k: int) -> tuple[str, list[str], list[Any]]:
    draws = [2**power for power in range(1, k.bit_length()) if 2**power < k]
    columns = [f"avg@{k}"] + [f"pass@{j}" for j in draws] + ([f"pass@{k}", f"maj@{k}", f"worst@{k}"] if k > 1 else [])
    rows = []
    for source, figures in groups.items():
        cells = [[f"{100 * figures[scorer][name][part]:.1f}" for part in ("value", "low", "high")] for name in columns]
        rows.append((source, figures["problems"], cells))
    return scorer, columns, rows


def _cell(figures: Mapping[str, Any], name: str) -> str:
    return format(figures[name], _CONDUCT[name][1]) if name in figures else "–"


def _charts(groups: Mapping[str, Any], scorers: Sequence[str], k: int, rows: Sequence[Row]) -> list[Chart]:
    averages = Curve("share right", range(1, len(rows) + 1), [row.average for row in rows])
    shares = bars([averages], Axis("problem", whole=True), Axis("share right", 0, 1))
    found = [Chart("shares", "Share of right answers by problem", "Problems in the order of their share.", shares)]
    if k > 1:
        caption = "Chance that the best of j samples is right, with its interval over problems."
        for scorer in scorers:
            pass_at = curves(_pass(groups, scorer, k), Axis("samples j", log=True, base=2), Axis("pass@j", 0, 1))
            found.append(Chart(f"pass-{scorer}", f"pass@j, {scorer}", caption, pass_at))
    return found


def _pass(groups: Mapping[str, Any], scorer: str, k: int) -> list[Curve]:
    draws = range(1, k + 1)
    found = []
    for source, figures in groups.items():
        of = {part: [figures[scorer][f"pass@{j}"][part] for j in draws] for part in ("value", "low", "high")}
        found.append(Curve(source, draws, of["value"], low=of["low"], high=of["high"]))
    return cycled(found)


def _row(prompt: Prompt, samples: Sequence[Sample], scorer: ScoreColumn) -> Row:
    found = [scorer.scores[sample.prompt_id, sample.index] for sample in samples]
    scores = [score for score in found if score is not None]
    shown = [said(sample, scorer.name) for sample in samples]
    answers = Counter("(no answer)" if text is None else text[:200] for text in shown)
    question = prompt.messages[-1]["content"] if prompt.messages else prompt.id
    text = samples[0].text
    return Row(
        prompt.id,
        prompt.data_source,
        question,
        prompt.answer,
        sum(scores) / len(scores),
        answers.most_common(8),
        text if len(text) <= _TEXT else f"{text[:_TEXT]} …",
        f"ended by {samples[0].finish_reason}",
    )
