"""A run that gets worse says so, at once and at the end; noise does not; the best step is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ctpo_megatron.base.run_paths import MARKER, RunPaths, step_name
from ctpo_megatron.report import Decline, RunData, print_summary, summarize
from ctpo_megatron.report.learning import learning_checks
from tests.tracking.synthetic_run import logged

ACCURACY = "val/a/acc/mean@1"


def first_said(rewards: Sequence[float], groups: int, std: float = 0.5) -> int | None:
    """The step at which a fall is reported."""
    decline = Decline(groups)
    said = [decline.add({"reward/mean": reward, "reward/std": std}) for reward in rewards]
    found = [step for step, texts in enumerate(said, start=1) if texts]
    assert len(found) <= 1  # once
    return found[0] if found else None


@pytest.mark.parametrize(
    ("rewards", "groups", "std", "step"),
    [
        ([0.53, 0.03, 0.03, 0.03], 32, 0.5, 2),  # a learning rate that is far too high
        ([0.53, *[0.03] * 12], 8, 0.5, None),  # one step of eight prompts says too little of the start
        ([0.53, 0.5, 0.55, 0.51, 0.52, *[0.03] * 6], 16, 0.5, 10),
        ([-1.0, -1.0, -9.0], 64, 2.0, 3),  # whatever the sign and the scale
        ([0.5, 0.49, 0.51, 0.5, 0.48, 0.5, 0.49], 100_000, 0.5, None),  # certain, and too little to speak of
        ([0.2, 0.4, 0.6, 0.8, 0.9], 32, 0.4, None),
        ([1.0, 0.0], 32, 0.0, 2),
        ([1.0, 1.0], 32, 0.0, None),
        ([0.5], 32, 0.5, None),
    ],
)
def test_a_fall_beyond_noise_is_said_once(rewards: list[float], groups: int, std: float, step: int | None) -> None:
    assert first_said(rewards, groups, std) == step


@pytest.mark.parametrize(("alike", "most"), [(True, 0.05), (False, 0.0)])
def test_noise_is_no_fall(alike: bool, most: float) -> None:
    """200 runs of 300 steps that stay where they are. alike: all samples of a prompt have one outcome."""
    rng = np.random.default_rng(0)
    false = 0
    for _ in range(200):
        chances = np.full((300, 32), 0.5) if alike else rng.uniform(size=(300, 32))
        rewards = rng.binomial(1, chances) if alike else rng.binomial(8, chances) / 8
        false += first_said(rewards.mean(1).tolist(), 32) is not None
    assert false / 200 <= most


@pytest.mark.parametrize(
    ("values", "problems", "worse"),
    [
        ([0.5, 0.0], 256, True),
        ([0.5, 0.4], 256, False),
        ([0.1, 0.0], 256, True),
        ([0.1, 0.05], 256, False),
        ([1.0, 0.8], 256, True),
        ([0.5, 0.2], 30, False),
        ([0.5, 0.05], None, True),
        ([0.4, 0.9], 256, False),
        ([0.9, 0.2, 0.9], 256, False),  # it has recovered
    ],
)
def test_an_accuracy_falls_by_its_number_of_problems(values: list[float], problems: int | None, worse: bool) -> None:
    decline = Decline(32)
    for value in values:
        decline.add({ACCURACY: value} | ({"val/a/problems": problems} if problems else {}))
    assert decline.trends()[ACCURACY].worse == worse


def a_run(folder: Path, rewards: Sequence[float], accuracies: Sequence[float], **sections: dict[str, object]) -> Path:
    same = {"reward/std": 0.5, "rollout/tool_use": 1.0, "val/a/problems": 100.0}
    pairs = zip(rewards, accuracies, strict=True)
    return logged(folder, *(same | {"reward/mean": a, ACCURACY: b} for a, b in pairs), first=0, **sections)


def complete(run_dir: Path, step: int) -> Path:
    folder = RunPaths(run_dir).checkpoints / step_name(step)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    return folder


def test_the_report_and_the_summary_name_the_fall_and_the_best_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = a_run(tmp_path / "worse", [0.55, 0.6, 0.05, 0.02], [0.5, 0.6, 0.1, 0.0])
    rows = {check.label: check for check in learning_checks(RunData.load(worse))}
    assert (rows["Sampled reward"].good, rows["Accuracy on a"].good, rows["Best step"].value) == (False, False, "1")
    assert "0.55 → 0.02" in rows["Sampled reward"].value and "lr is too high" in rows["Sampled reward"].note
    assert "keep_best: 1" in rows["Best step"].note
    kept = complete(worse, 1)
    (best,) = [check for check in learning_checks(RunData.load(worse)) if check.label == "Best step"]
    assert best.note == f"held-out accuracy 0.6: {kept}"
    print_summary(worse)
    shown = " ".join(capsys.readouterr().out.split())
    assert "sampled reward fell from 0.55 to 0.02" in shown and "best step: 1, held-out accuracy 0.6" in shown
    good = a_run(tmp_path / "good", [0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    print_summary(good)
    shown = capsys.readouterr().out
    assert "fell" not in shown and "best step" not in shown
    assert all(check.good is not False for check in learning_checks(RunData.load(good)))


def test_the_best_step_is_ranked_as_checkpoints_are(tmp_path: Path) -> None:
    by_reward = {"keep_best": 1, "best_metric": "reward/mean", "every": 1}
    run_dir = a_run(tmp_path / "reward", [0.1, 0.9, 0.5], [0.5, 0.6, 0.7], checkpoint=by_reward)
    best = summarize(run_dir).best
    assert best is not None and (best.step, best.measure, best.last) == (1, "reward/mean", 0.5)
    by_accuracy = summarize(a_run(tmp_path / "tie", [0.1, 0.9, 0.5], [0.7, 0.6, 0.7])).best
    assert by_accuracy is not None and by_accuracy.step == 2
    assert summarize(logged(tmp_path / "empty")).best is None
