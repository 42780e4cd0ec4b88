"""The report and the summary: complete, offline, safe, and made from the run directory alone."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ctpo_megatron.config import resolved_objective
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.report import print_summary, summarize, write_report
from ctpo_megatron.report.figures import figures
from ctpo_megatron.report.health import checks
from ctpo_megatron.report.page import facts, tiles
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.theme import DARK, LIGHT
from ctpo_megatron.rewards import COUNTS
from ctpo_megatron.tracking import MetricsWriter, write_trajectories
from tests.report.test_trajectories import Elements
from tests.tracking.synthetic_run import decode, logged, make_config, make_groups, step_metrics, write_run

FIGURES = (
    "reward", "accuracy", "tool", "signal", "clip", "is_ratio", "mismatch", "grad_norm", "length", "time", "throughput",
    "sft", "memory",
)  # fmt: skip


def test_sections_figures_and_headline_are_there(demo_run, page):
    for part in ("curves", "trajectories", "health", "settings"):
        assert f'<section id="{part}">' in page
    for name in FIGURES:
        assert (demo_run / "figures" / f"{name}.png").stat().st_size > 5_000
        assert f'id="figure-{name}"' in page
    assert "accuracy on toolmath from 0.40 to 0.94" in page
    assert "Left out" not in page
    assert "data-ratio=" in page, "the cumulative ratio and its window are drawn"
    assert len(page) < 2_000_000


def test_nothing_is_loaded_from_elsewhere(page):
    assert not re.search(r"https?://", page)
    for element in Elements(page).found:
        assert element[""] not in ("link", "iframe", "object", "embed", "img")
        for name in element.keys() & {"src", "href", "xlink:href", "action"}:
            assert str(element[name]).startswith("#"), element
    assert "default-src 'none'" in page
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_charts_take_their_colours_from_the_page(page):
    data = json.loads(re.search(r'id="chart-data">(.*?)</script>', page, re.DOTALL)[1])
    used = set(re.findall(r"var\(--(\w+)\)", json.dumps(data)))
    assert {"blue", "muted", "grid"} <= used <= LIGHT.keys() and LIGHT["blue"] not in json.dumps(data)
    for theme in (LIGHT, DARK):
        assert all(f"--{name}:{colour};" in page for name, colour in theme.items())
    named = set(re.findall(r'data-chart="([^"]+)"', page))
    assert named == data["charts"].keys() and all(chart["description"] for chart in data["charts"].values())


def test_missing_metrics_leave_a_section_out_and_say_so(tmp_path):
    run_dir = logged(tmp_path, {"reward/mean": 0.2, "actor/grad_norm": float("nan")})
    (run_dir / "figures").mkdir()
    (run_dir / "figures" / "is_ratio.png").write_bytes(b"of an earlier report")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert {path.name for path in (run_dir / "figures").iterdir()} == {"reward.png"}
    assert "Importance ratio: <code>pg_update/is_ratio/mean</code>" in page
    assert "<code>actor/grad_norm</code>" in page
    assert "wrote no trajectories" in page


def test_throughput_memory_and_packing_are_told(demo_run, page):
    run = RunData.load(demo_run)
    assert [tile.label for tile in tiles(run, summarize(run))][-2:] == ["Update", "Trainer memory"]
    assert {"Useful tokens", "Update overhead", "Rank imbalance"} <= {check.label for check in checks(run)}
    assert summarize(run).peak_mib == 660.0


@pytest.mark.parametrize(
    ("trainer", "sampler", "limit", "largest", "mean", "good"),
    [
        ("float32", "auto", None, 3e-5, 2e-6, True),
        ("float32", "float32", None, 0.4, 0.02, False),
        ("bfloat16", "auto", None, 0.9, 0.012, True),
        ("bfloat16", "bfloat16", None, 9.0, 0.6, False),
        ("float16", "auto", None, 0.9, 0.004, True),
        ("float16", "auto", None, 0.9, 0.03, False),
        ("float32", "bfloat16", None, 0.9, 0.004, False),
        ("bfloat16", "float32", 1.0, 0.9, 0.004, False),  # the limit does not make up for it
        ("float32", "auto", 1e-3, 3e-5, 2e-6, True),
        ("float32", "auto", 1e-3, 3e-3, 2e-6, False),
        ("bfloat16", "auto", 1.0, 0.9, 0.2, True),
    ],
)
def test_the_mismatch_is_judged_without_a_limit_too(tmp_path, trainer, sampler, limit, largest, mean, good):
    rollout = {"engine": {"dtype": sampler}, "mismatch_limit": limit}
    name = "mismatch/log_prob_abs_"
    steps = [{f"{name}max": largest / (3 - step), f"{name}mean": mean * step / 2} for step in (1, 2)]
    run_dir = logged(tmp_path, *steps, rollout=rollout, policy={"dtype": trainer})
    [row] = [check for check in checks(RunData.load(run_dir)) if check.label == "Sampler–trainer mismatch"]
    assert row.good is good and row.value == f"{largest:.2g}"
    if limit is None or trainer != sampler != "auto":
        assert "policy.dtype" in row.note and "rollout.engine.dtype" in row.note and trainer in row.note


def test_a_run_without_any_metrics_still_has_a_report(tmp_path):
    run_dir = logged(tmp_path)
    assert "no reward was recorded" in write_report(run_dir).read_text(encoding="utf-8")
    print_summary(run_dir, Console(file=io.StringIO()))


def test_long_runs_and_long_texts_stay_small(tmp_path):
    run_dir = write_run(tmp_path, steps=2, samples=2, prompts=2, final="word " * 2_000)
    rng = random.Random(1)
    with MetricsWriter(run_dir) as writer:
        for step in range(3, 400):
            writer.log(step, step_metrics(rng, step, 400))
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert len(page.encode()) < 2_000_000
    assert "characters left out" in page


def test_not_a_run_directory_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run directory"):
        write_report(tmp_path)


def test_summary_is_rebuilt_from_the_files(demo_run):
    summary = summarize(demo_run)
    metrics = [json.loads(line) for line in (demo_run / "metrics.jsonl").read_text().splitlines()]
    rewards = [record["reward/mean"] for record in metrics if "reward/mean" in record]
    assert summary.reward is not None
    assert summary.reward.start == rewards[0]
    assert summary.reward.end == pytest.approx(sum(rewards[-5:]) / 5)
    assert summary.accuracy["toolmath"].end == 0.94
    assert summary.steps == 20
    assert summary.tokens == 20 * 23000
    output = io.StringIO()
    print_summary(demo_run, Console(file=output, width=120))
    for part in ("sampled reward", "accuracy, toolmath", "tool use", "sft", "rollout", "report.html"):
        assert part in output.getvalue()


@pytest.mark.parametrize(("setting", "faster"), [(None, "1.6"), ({"max_staleness": 1}, ""), ({"lag": 4}, "")])
def test_what_sampling_ahead_would_give_is_said(setting: dict[str, int] | None, faster: str, tmp_path: Path) -> None:
    run_dir = logged(tmp_path, *({"time/step": 4.0, "time/rollout": 2.5} for _ in range(2)), rollout=setting or {})
    output = io.StringIO()
    print_summary(run_dir, Console(file=output, width=160))
    said = f"rollout.max_staleness=1 would sample the next batch meanwhile: at most {faster} times as fast"
    assert (said in output.getvalue()) == bool(faster) and ("meanwhile" in output.getvalue()) == bool(faster)


REWARDS = {"reward/mean": 0.2, "reward/std": 0.1}


def parts_of(run_dir: Path) -> list[str]:
    """Labels of the figure of the parts of the reward."""
    (figure,) = [figure for figure in figures([RunData.load(run_dir)]) if figure.name == "reward_parts"]
    return [line.label for line in figure.lines]


def test_what_users_rewards_return_is_drawn_by_itself(tmp_path):
    run_dir = logged(tmp_path, *({**REWARDS, "reward/format": 0.5 * step, "reward/judge": 0.4} for step in (1, 2)))
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "Parts of the reward" in page and "Answers without a box" not in page
    assert parts_of(run_dir) == ["format", "judge"]
    assert (run_dir / "figures" / "reward_parts.png").stat().st_size > 5_000


def test_what_turns_earned_is_drawn_and_stands_at_each_turn(tmp_path):
    metrics = REWARDS | {f"reward/turn/{k}": 0.1 * k for k in (10, 2, 1)}
    run_dir = logged(tmp_path, metrics, metrics)
    groups = make_groups(random.Random(0), prompts=1, samples=2, share_right=0.5)
    for trajectory in groups[0].trajectories:
        trajectory.turn_rewards = [0.125 * turn for turn in range(1, trajectory.turns + 1)]
    turns = groups[0].trajectories[0].turns
    write_trajectories(run_dir, 2, groups, decode, extra={0: {"turn_advantages": [-0.5] * turns}})
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "model · turn 2 · earned 0.25 · advantage -0.50<" in page and "model · turn 2 · earned 0.25<" in page
    assert parts_of(run_dir) == ["turn/1", "turn/10", "turn/2"]


def test_what_was_not_judged_is_no_part_of_the_reward_and_no_right_or_wrong_answer(tmp_path):
    metrics = REWARDS | {f"reward/{name}": 1.0 for name in ("no_verdict", "groups_unjudged", *COUNTS.values())}
    run_dir = logged(tmp_path, metrics, metrics)
    groups = make_groups(random.Random(0), prompts=2, samples=3, share_right=0.5)
    for group in groups:
        group.trajectories[0].reward, group.trajectories[0].no_verdict = None, NoVerdict("timeout", "late")
    write_trajectories(run_dir, 2, groups, decode)
    assert parts_of(run_dir) == []
    judged = {check.label: check.good for check in checks(RunData.load(run_dir)) if check.label.startswith("Scorer")}
    kinds = ("failures", "timeouts", "crashes", "without an answer", "not finite")
    assert judged == {f"Scorer {kind}": False for kind in kinds}
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert 'class="episode"' in page and 'data-reward="none"' not in page  # the best and the worst of a group


def test_the_settings_have_the_objective_in_numbers_as_the_run_recorded_it(demo_run: Path) -> None:
    run = RunData.load(demo_run)
    objective = resolved_objective(make_config(demo_run.parent).objective)
    recorded = dict(facts(replace(run, environment={"objective": objective})))
    assert objective["summary"] == f"Objective: {recorded['Objective']}"
    assert dict(facts(run))["Anchor"] == "proximal, correction: none"
    assert dict(facts(run))["Batch"].endswith(" prompts")
    twice = replace(run, config=run.config | {"policy": run.config["policy"] | {"passes_per_batch": 2}})
    assert dict(facts(twice))["Batch"].endswith(" prompts, 2 passes")
    for older in ({}, {"objective": None}, {"objective": {"preset": "grpo"}}):
        assert dict(facts(replace(run, environment=older)))["Objective"] == "ctpo"


def test_page_and_terminal_show_the_same_time(tmp_path: Path) -> None:
    """The page cannot contain the time of writing it, which the terminal knows."""
    run_dir = write_run(tmp_path)
    (before,) = [tile for tile in tiles(RunData.load(run_dir), summarize(run_dir)) if tile.label == "Time"]
    file = run_dir / "stages.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"report": {"wall": 100.0, "cpu": 90.0}}))
    console = Console(record=True, width=120, file=io.StringIO())
    print_summary(run_dir, console)
    assert f"{before.value} in all" in console.export_text()
    assert [tile for tile in tiles(RunData.load(run_dir), summarize(run_dir)) if tile.label == "Time"] == [before]
