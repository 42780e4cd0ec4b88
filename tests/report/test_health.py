"""Health judges what there is: nothing of steps without tokens, and no number for what never comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.report.figures import figures
from ctpo_megatron.report.health import checks
from ctpo_megatron.report.learning import Indicator
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.trajectories.ratio import ratio_name
from tests.tracking.synthetic_run import logged


def judged(folder: Path, *steps: dict[str, float]) -> dict[str, Indicator]:
    run_dir = logged(folder, *steps, rollout={"max_response_tokens": 8000})
    return {check.label: check for check in checks(RunData.load(run_dir))}


@pytest.mark.parametrize(
    ("last", "shown", "good"),
    [
        (1e18, "never", True),
        (9000.0, "token 9e+03", True),
        (3086.0, "token 3.09e+03", False),
        (90.0, "token 90", False),
    ],
)
def test_noise_that_never_matters_has_no_number(tmp_path: Path, last: float, shown: str, good: bool) -> None:
    """The earliest position of all steps, against the longest response."""
    check = judged(tmp_path, {"mismatch/t_star": 1e18}, {"mismatch/t_star": last})["Noise position"]
    assert (check.value, check.good) == (shown, good)


@pytest.mark.parametrize(
    ("metrics", "shown", "good", "note"),
    [
        ({"unrecorded": 1.0}, "unknown", None, "policy.router_replay is off"),
        ({"unrecorded": 0.0, "agreement": 0.9876}, "98.76%", True, "in the worst step"),
        ({"unrecorded": 0.25, "agreement": 0.5}, "50.00%", False, "25.0% of the tokens"),
    ],
)
def test_the_agreement_of_routers(
    tmp_path: Path, metrics: dict[str, float], shown: str, good: bool | None, note: str
) -> None:
    routers = {f"mismatch/router_{name}": value for name, value in metrics.items()}
    check = judged(tmp_path / "sparse", routers)["Router agreement"]
    assert (check.value, check.good) == (shown, good) and note in check.note
    assert "Router agreement" not in judged(tmp_path / "dense", {"mismatch/tokens": 5.0})


def test_steps_without_tokens_are_counted_and_not_judged(tmp_path: Path) -> None:
    trained = {"packing/useful_token_fraction": 0.99, "time/update_overhead_fraction": 0.02, "packing/imbalance": 1.01}
    idle = {"packing/useful_token_fraction": 0.0, "time/update_overhead_fraction": 1.0, "packing/imbalance": 1.0}
    found = judged(tmp_path / "some", trained, idle, idle)
    assert (found["Useful tokens"].value, found["Useful tokens"].good) == ("99.0%", True)
    assert (found["Update overhead"].value, found["Rank imbalance"].value) == ("2.0%", "1.010")
    assert (found["Steps without tokens"].value, found["Steps without tokens"].good) == ("2", False)
    alone = judged(tmp_path / "none", idle)
    assert "Useful tokens" not in alone and "Update overhead" not in alone
    assert "Steps without tokens" not in judged(tmp_path / "all", trained)
    wasteful = {"packing/useful_token_fraction": 0.90, "time/update_overhead_fraction": 0.2}
    found = judged(tmp_path / "padded", trained, wasteful)  # the worst step counts
    assert (found["Useful tokens"].value, found["Useful tokens"].good) == ("90.0%", False)
    assert found["Update overhead"].good is False


@pytest.mark.parametrize(
    ("objective", "symbol"),
    [
        ({}, "r = exp S_t"),
        ({"preset": "grpo"}, "r = exp d_t"),
        ({"preset": "gspo"}, "r = exp(S_T / T)"),
        ({"preset": "grpo", "ratio_mode": "sequence"}, "r = exp S_T"),
        ({"preset": "ctpo-geomean"}, "r = exp(S_t / t)"),
    ],
)
def test_captions_name_the_ratio_of_the_objective(tmp_path: Path, objective: dict[str, str], symbol: str) -> None:
    run = RunData.load(logged(tmp_path, objective=objective))
    (ratio,) = [figure for figure in figures([run]) if figure.name == "is_ratio"]
    assert ratio.y.title == ratio_name(run).symbol == symbol and ratio_name(run).name in ratio.question
    other = RunData.load(logged(tmp_path, name="other", objective={"preset": "cispo"}))
    (both,) = [figure for figure in figures([run, other]) if figure.name == "is_ratio"]
    assert both.y.title == ("r = exp d_t" if symbol == "r = exp d_t" else "ratio r")
