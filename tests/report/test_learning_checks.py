"""A dead run says so: after its first batch, each sign with its cause and the file to look at, and in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.report import first_batch_warnings
from ctpo_megatron.report.learning import learning_checks
from ctpo_megatron.report.run_data import RunData
from tests.tracking.synthetic_run import logged

DUMP = "runs/x/trajectories/step_000001.jsonl"
HEALTHY = {
    "reward/groups_mixed": 0.5,
    "reward/mean": 0.4,
    "reward/std": 0.49,
    "reward/no_box": 7.0,
    "rollout/truncated": 0.1,
    "rollout/tool_error_rate": 0.25,
    "rollout/model_tokens_mean": 10.0,
    "rollout/prompts_repeated": 0.0,
    "tokens/model": 160.0,
    "sandbox/calls": 8.0,
    "sandbox/success": 6.0,
    "sandbox/parse_error": 1.0,
    "sandbox/runtime_error": 1.0,
    "sandbox/timeout": 0.0,
    "actor/grad_norm_max": 0.3,
}
NO_GRADIENT = {"actor/grad_norm_max": 0.0}
UNIFORM = {"reward/groups_mixed": 0.0, "reward/std": 0.0} | NO_GRADIENT
LOST = {"reward/no_verdict": 1.0, "reward/groups_mixed": 0.0}
PARSE_ERRORS = {"rollout/tool_error_rate": 0.875, "sandbox/parse_error": 7.0, "sandbox/runtime_error": 0.0}


def said(changes: dict[str, float], tools: bool = True) -> list[str]:
    return list(first_batch_warnings(HEALTHY | changes, DUMP, tools=tools))


@pytest.mark.parametrize(
    ("changes", "what", "cause"),
    [
        (UNIFORM | {"reward/mean": 0.0}, "outcomes: all rewards are 0, so the gradient", "ground truths"),
        (UNIFORM | {"reward/mean": 1.0}, "no group has both outcomes: all rewards are 1, so", "too easy"),
        (UNIFORM | {"reward/std": 0.5}, "outcomes: the rewards within each group are equal, so", "rollout.temperature"),
        (NO_GRADIENT, "the gradient is zero, though groups have both", "every token is clipped"),
        (NO_GRADIENT | {"rollout/masked_tokens": 1.0}, "the gradient is zero", "rollout.filters took every token"),
        ({"reward/no_verdict": 0.25}, "25% of the trajectories have no verdict", "longer than reward.timeout_s"),
        (LOST | NO_GRADIENT, "100% of the trajectories have no verdict", "the reward function raises"),
        ({"reward/no_box": 16.0}, r"100% of the answers have no complete \boxed{}", "does not ask for a box"),
        ({"rollout/truncated": 0.75}, "75% of the trajectories were cut off", "rollout.max_response_tokens"),
        ({"sandbox/calls": 0.0}, "no tool was called", "rollout.tool_parser"),
        (PARSE_ERRORS, "88% of the tool calls failed, 7 of 8 with parse_error", "as rollout.tool_parser reads them"),
        ({"rollout/prompts_repeated": 59.0}, "59 groups are of a prompt that the batch", "data.train is small"),
    ],
)
def test_a_sign_has_its_cause_and_a_place_to_look(changes: dict[str, float], what: str, cause: str) -> None:
    (text,) = said(changes)
    assert what in text and cause in text
    assert DUMP in text or "metrics.jsonl" in text or "rollout.prompts_per_step" in text


def test_a_healthy_batch_says_nothing() -> None:
    assert said({}) == []
    assert said({"sandbox/calls": 0.0}, tools=False) == []
    unjudged = {name: value for name, value in HEALTHY.items() if name not in ("reward/mean", "reward/std")}
    assert len(list(first_batch_warnings(unjudged | LOST, DUMP, tools=True))) == 1  # there is no mean to speak of
    assert list(first_batch_warnings({}, DUMP, tools=True)) == []  # a reward of one's own, a replay, an old recording


def rows(folder: Path, *changes: dict[str, float]) -> dict[str, tuple[str, bool | None]]:
    run_dir = logged(folder, *(HEALTHY | change for change in changes))
    return {check.label: (check.value, check.good) for check in learning_checks(RunData.load(run_dir))}


def test_the_report_judges_the_whole_run(tmp_path: Path) -> None:
    dead = UNIFORM | {"reward/no_box": 16.0, "rollout/truncated": 1.0, "rollout/prompts_repeated": 3.0}
    assert rows(tmp_path / "dead", dead, dead, dead) == {
        "Sampled reward": ("0.4 → 0.4", None),
        "Steps without signal": ("3 of 3", False),
        "Steps with zero gradient": ("3 of 3", False),
        "Answers without a box": ("100%", False),
        "Cut off": ("100%", False),
        "Failed tool calls": ("25%", True),
        "Repeated prompts": ("3", False),
    }
    good = rows(tmp_path / "good", *[{}] * 9, UNIFORM)
    assert good["Steps without signal"] == ("1 of 10", True)
    assert [label for label, (_, ok) in good.items() if not ok] == ["Sampled reward"]
    lost = [rows(tmp_path / f"{share}", {}, {"reward/no_verdict": share}, {}) for share in (0.25, 0.75)]
    assert [each["Without a verdict"] for each in lost] == [("25%", True), ("75%", False)]
    assert "Without a verdict" not in good
    assert rows(tmp_path / "late", {}, {}, {"rollout/truncated": 0.9})["Cut off"] == ("37%", False)


@pytest.mark.parametrize(
    ("end", "good", "note"),
    [
        (0.55, None, "noise may explain"),
        (0.48, None, "noise may explain"),
        (1.0, True, ""),
        (0.0, False, "it fell"),
    ],
)
def test_only_a_gain_beyond_noise_is_good(tmp_path: Path, end: float, good: bool | None, note: str) -> None:
    """256 problems, 32 prompts a step. A check mark at a run that stayed where it was would say that it learned."""
    accuracies = ({"reward/mean": value, "val/a/acc/mean@1": value, "val/a/problems": 256.0} for value in (0.5, end))
    run_dir = logged(tmp_path, *(HEALTHY | metrics for metrics in accuracies))
    found = {check.label: check for check in learning_checks(RunData.load(run_dir))}
    for label in ("Sampled reward", "Accuracy on a"):
        assert found[label].good == good and note in found[label].note
