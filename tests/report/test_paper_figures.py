"""Figures of the paper from runs whose tokens were drawn from a known law, and what their captions say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from ctpo_megatron.objective import PolicyObjective, PositionStats, SamplerTokens, position_stats, skipped_stats
from ctpo_megatron.report.charts import save_charts
from ctpo_megatron.report.figures import outcome_charts
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.positions import (
    Growth,
    chosen_steps,
    clip_rates,
    effective_sizes,
    entropies,
    late_positions,
    law_charts,
    position_charts,
    sampler_spread,
    window_rates,
)
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.tracking import PositionsWriter
from tests.report.dumped_walks import dump, run_of
from tests.tracking.synthetic_run import write_run

SIGMA, TRAJECTORIES, LENGTH = 0.03, 400, 300
NO_DUMPS: Mapping[int, np.ndarray] = MappingProxyType({})
Law = Callable[[np.ndarray], np.ndarray]


def drawn(
    sigma: float | np.ndarray = SIGMA, seed: int = 0, zero: int = 0
) -> tuple[PositionStats, np.ndarray, np.ndarray]:
    """Sums of trajectories with independent log-ratios, S_t `[TRAJECTORIES, LENGTH]` and advantages; half of them
    positive. zero: further trajectories of advantage 0 that no pass runs over."""
    generator = np.random.default_rng(seed)
    steps = generator.normal(0, sigma, (TRAJECTORIES, LENGTH)).astype(np.float32)
    advantage = np.where(np.arange(TRAJECTORIES) % 2, 1.0, -1.0).astype(np.float32)
    ones, flat = torch.ones(steps.size), torch.from_numpy(steps.reshape(-1))
    ends = torch.arange(0, steps.size + 1, LENGTH)
    sampler = SamplerTokens(-ones, torch.zeros(steps.size), 0, trainer=2 * flat - 1)
    found = position_stats(
        flat, torch.zeros(steps.size), torch.from_numpy(np.repeat(advantage, LENGTH)), ones, ones,
        PolicyObjective.preset("ctpo"), ends, entropy=torch.full((steps.size,), 0.25), sampler=sampler,
    )  # fmt: skip
    skipped = skipped_stats([(np.ones(LENGTH), np.ones(LENGTH))] * zero)
    return found + skipped, steps.astype(np.float64).cumsum(1), advantage


def written(
    directory: Path, steps: dict[int, PositionStats], name: str = "ctpo", dumps: Mapping[int, np.ndarray] = NO_DUMPS
) -> RunGroup:
    """A group of one run with positions of these steps, of the last mini-batch and of all. dumps: S_t of steps."""
    directory.mkdir(exist_ok=True)
    writer = PositionsWriter(directory)
    for step, found in steps.items():
        writer.log(step, {"last": found.record(), "all": found.record()})
    for step, prefix in dumps.items():
        dump(directory, step, prefix)
    return RunGroup(name, {"0": (run_of(directory, TRAJECTORIES // 4),)}, {})


def test_the_law_of_independent_steps_is_found(tmp_path: Path) -> None:
    steps = {1: drawn(0.5), 2: drawn(), 3: drawn(seed=1)}
    dumps = {step: prefix for step, (_, prefix, _) in steps.items()}
    group = written(tmp_path / "a", {step: found for step, (found, *_) in steps.items()}, dumps=dumps)
    sums = late_positions(group, "last")
    assert sums and sums.steps == [2, 3]
    found = Growth.of(sums)
    assert found.law and found.law.sigma == pytest.approx(SIGMA, rel=0.03)
    points, fit = found.curves("blue")
    assert points.y == found.std and fit.y == pytest.approx([found.law.sigma * t**0.5 for t in found.t])
    assert found.verdict.startswith("std(S_t) grows like sqrt(t), sigma 0.0")
    assert [each.label for each in chosen_steps(group)] == ["step 1", "step 2", "step 3"]
    chart = law_charts([group])[0]
    assert all(f"step {step}: std(S_t) grows like sqrt(t)" in chart.caption for step in (1, 2, 3))
    assert [layer["mark"]["type"] for layer in chart.spec["layer"]] == ["area", "line", "point"]
    first = next(row for row in chart.spec["data"]["values"] if row["series"] == "step 2" and "low" in row)
    assert (first["low"] + first["high"]) / 2 == pytest.approx(SIGMA * first["x"] ** 0.5, rel=0.05)
    assert first["high"] / first["low"] == pytest.approx(1.2 / 0.8)


@pytest.mark.parametrize(
    ("certain", "said"),
    [
        ((8, 160), "48% of the tokens are at positions where the token is almost certain"),
        ((4, 256), "84% of the tokens"),
        ((4, 16), ""),  # too few to explain it
    ],
)
def test_certain_tokens_are_the_reason_why_the_law_fails(tmp_path: Path, certain: tuple[int, int], said: str) -> None:
    """Tokens that are certain add no spread; those after them add four times as much as the first ones."""
    t = np.arange(1, 301)
    first, last = certain
    spread = np.where((t > first) & (t <= last), 1e-5, np.where(t > 250, 4 * SIGMA, SIGMA))
    group = written(tmp_path / "a", {1: drawn(spread)[0]})
    sums = late_positions(group, "last")
    assert sums
    found = Growth.of(sums)
    assert found.law and not found.law.how
    caption = law_charts([group])[0].caption
    assert said in found.why_not and found.why_not in caption
    assert (found.why_not == "") == (said == "")
    assert not said or "docs/notebooks/theory.ipynb, When sqrt(t) fails" in caption


def test_windows_clip_what_they_should(tmp_path: Path) -> None:
    """Against S_t itself: shares of all loss tokens, advantage 0 included."""
    zero = 100
    stats, prefix, advantage = drawn(zero=zero)
    sums = late_positions(written(tmp_path / "a", {1: stats}), "last")
    assert sums
    t = np.arange(1, LENGTH + 1)
    up, down = (advantage > 0)[:, None], (advantage < 0)[:, None]
    outside = {
        "fixed": (up & (prefix > np.log(5))) | (down & (prefix < np.log(0.5))),
        "widening": (up & (prefix > 0.05 * np.sqrt(t))) | (down & (prefix < -0.025 * np.sqrt(t))),
    }
    rates = window_rates(sums)
    for window, clipped in outside.items():
        by_t = clipped.sum(0) / (TRAJECTORIES + zero)
        at, values = rates[window]
        assert at[:16] == list(range(1, 17))
        assert values[:16] == pytest.approx(by_t[:16], abs=1.01 / (TRAJECTORIES + zero))
        assert values[-1] == pytest.approx(by_t[[*map(int, np.arange(269, 300))]].mean(), abs=0.01)
    # CTPO clips by the widening window, and by its dual bound.
    dual = stats.column("clip_dual").sum(0)[:16] / (TRAJECTORIES + zero)
    both = np.array(rates["widening"][1][:16]) + dual
    assert dual.any() and rates["own"][1][:16] == pytest.approx(both, abs=0.003)
    assert max(rates["widening"][1]) > 0.05 > max(rates["fixed"][1][:16])


def test_sizes_and_entropy_by_position(tmp_path: Path) -> None:
    stats, prefix, _ = drawn(zero=10)
    sums = late_positions(written(tmp_path / "a", {1: stats}), "all")
    assert sums
    weights = np.exp(prefix[:, 9])
    assert effective_sizes(sums)[1][9] == pytest.approx(weights.sum() ** 2 / (TRAJECTORIES * (weights**2).sum()))
    t, entropy = entropies(sums)
    assert entropy == pytest.approx([0.25] * len(t)) and len(t) > 20
    assert sampler_spread(sums)[1][9] == pytest.approx(2 * prefix[:, 9].std(), rel=1e-4)
    assert sampler_spread(replace(sums, stats=PositionStats.empty())) == ([], [])
    sides = clip_rates(sums)
    assert {*sides} <= {"high", "low", "dual"} and sides["low"][1][9] == pytest.approx(
        2 * ((prefix < -0.025 * np.sqrt(np.arange(1, LENGTH + 1)))[::2, 9]).mean() / 2, abs=0.01
    )


def test_bins_of_few_tokens_are_not_shown(tmp_path: Path) -> None:
    stats = drawn()[0]
    few = replace(stats, cells=stats.cells / TRAJECTORIES * 25)
    sums = late_positions(written(tmp_path / "a", {1: few}), "last")
    assert sums and effective_sizes(sums)[0][0] > 16  # a bin of several positions has more


def test_runs_without_positions_have_no_figure_of_them(tmp_path: Path) -> None:
    group = RunGroup("old", {"0": (RunData(tmp_path, {}, {}, [], [], {}),)}, {})
    assert law_charts([group]) == [*outcome_charts([group])] == [] and position_charts([group]) == []


def test_groups_are_told_apart(tmp_path: Path) -> None:
    groups = [
        written(tmp_path / "a", {1: drawn()[0]}),
        written(tmp_path / "b", {1: drawn(0.06, seed=3)[0]}, "gspo"),
        RunGroup("old", {"0": (RunData(tmp_path, {}, {}, [], [], {}),)}, {}),
    ]
    top, bottom = law_charts(groups)
    assert "old" not in top.caption
    unknown = "whether std(S_t) grows like sqrt(t) is not known: 0 prompts in the dumps, 20 are needed (R2 "
    assert f"ctpo: {unknown}" in top.caption and f"gspo: {unknown}" in top.caption
    assert {row["series"] for row in bottom.spec["data"]["values"]} == {
        f"{group}, {window}"
        for group in ("ctpo", "gspo")
        for window in ("fixed window", "widening window", "the run's own bounds")
    }


def test_outcomes_name_the_key_that_is_drawn(tmp_path: Path) -> None:
    run = RunData.load(write_run(tmp_path))
    other = [{**record, "reward/mean": 0.5} for record in run.metrics]
    groups = [
        RunGroup("ctpo", {"0": (run,), "1": (replace(run, metrics=other),)}, {}),
        RunGroup("b", {"0": (run,)}, {}),
    ]
    found = {chart.name: chart for chart in outcome_charts(groups)}
    assert [*found] == ["figure2_accuracy_1", "figure2_clip", "figure2_length", "figure2_reward"]
    assert found["figure2_clip"].caption == "`pg_update/clip/total/rate` against the step."
    rows = found["figure2_reward"].spec["data"]["values"]
    assert {row["series"]: "low" in row for row in rows} == {"ctpo": True, "b": False}
    with_both = [{**record, "actor/pg_clipfrac": 0.1} for record in run.metrics]
    both = RunGroup("both", {"0": (replace(run, metrics=with_both),)}, {})
    assert "`actor/pg_clipfrac`" in {chart.name: chart for chart in outcome_charts([both])}["figure2_clip"].caption
    # What only some runs have is not drawn where all have the other.
    assert "`pg_update/clip/total/rate`" in [*outcome_charts([groups[1], both])][1].caption


def test_figures_are_written(tmp_path: Path) -> None:
    group = written(tmp_path / "a", {1: drawn()[0], 2: drawn(seed=2)[0]})
    charts = [*law_charts([group]), *outcome_charts([group]), *position_charts([group])]
    assert len({chart.name for chart in charts}) == len(charts) == 6
    for path in save_charts(charts, tmp_path / "figures", ("svg",)):
        assert "NaN" not in path.read_text() and "<svg" in path.read_text()[:200]
