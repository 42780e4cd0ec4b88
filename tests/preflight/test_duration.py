"""Hours of a step and of a run, from stated speeds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ctpo_megatron import cli
from ctpo_megatron.config import Config
from ctpo_megatron.models import FAMILIES, ModelSpec
from ctpo_megatron.preflight import Speeds, duration_table
from tests.support.prefork import ROOT

SPEC = ModelSpec(FAMILIES["Qwen3ForCausalLM"], 36, 2560, 32, 8, 128, 9728, 40960, 151_936, tie_word_embeddings=True)


def rows(speeds: Speeds, ranks: int = 8, **rollout: Any) -> dict[str, str]:
    sections: dict[str, Any] = {"run": {"name": "x", "steps": 100}, "model": {"path": "m"}, "data": {"train": ["x"]}}
    sections["data"] |= {"max_prompt_tokens": 512}
    sections["rollout"] = {"prompts_per_step": 128, "max_response_tokens": 8000, "engines": 8, **rollout}
    sections["rollout"].setdefault("engine", {"dtype": "bfloat16"})
    config = Config(**sections, policy={"dtype": "bfloat16"})
    return {what: text for what, text, _ in duration_table(config, SPEC, ranks, speeds)}


def ends(text: str) -> tuple[float, float]:
    """Seconds."""
    found = re.fullmatch(r"(\S+) to (\S+) (s|min|h)", text)
    assert found is not None, text
    size = {"s": 1, "min": 60, "h": 3600}[found[3]]
    return float(found[1]) * size, float(found[2]) * size


def test_training_is_model_flops_over_peak_and_mfu() -> None:
    """1,024 trajectories of 512 + 4,000 tokens, one pass for old log-probs and three for the update."""
    flops = 1024 * 4 * SPEC.forward_flops(4512, 4000)
    found = ends(rows(Speeds(mfu=(0.2, 0.4), peak_tflops=500.0))["training"])
    assert found == pytest.approx((flops / (8 * 0.4 * 5e14), flops / (8 * 0.2 * 5e14)), rel=0.01)
    half = ends(rows(Speeds(mfu=(0.2, 0.4), peak_tflops=500.0), ranks=16)["training"])
    assert half == pytest.approx((found[0] / 2, found[1] / 2), rel=0.01)


def test_sampling_is_tokens_over_the_rate_of_the_engines() -> None:
    assert ends(rows(Speeds(decode=(1000.0, 4000.0)))["sampling"]) == pytest.approx((128, 512), rel=0.01)
    usual = ends(rows(Speeds())["sampling"])
    assert usual[0] < usual[1] < 2.1 * usual[0]  # half the bandwidth, and what does not depend on it
    shorter = ends(rows(Speeds(), max_response_tokens=4000)["sampling"])
    assert shorter[1] < usual[1] / 2


@pytest.mark.parametrize(("staleness", "combine"), [(0, sum), (1, max)])
def test_a_step_has_both_in_turn_or_the_longer_one(staleness: int, combine: Any) -> None:
    found = rows(Speeds(decode=(1000.0, 4000.0)), max_staleness=staleness)
    training, sampling, step, run = (ends(found[what]) for what in ("training", "sampling", "a step", "the run"))
    assert step == pytest.approx([combine(pair) for pair in zip(training, sampling, strict=True)], rel=0.02)
    assert run == pytest.approx([100 * seconds for seconds in step], rel=0.02)


def test_the_dry_run_says_that_nothing_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    shapes = ["--shapes", "configs/models/qwen3_4b.json", "--dry-run", "--cuda"]
    assert (
        cli.main(["train", "configs/qwen3_4b_tir.yaml", "configs/nodes_2x8.yaml", *shapes, "--mfu", "0.1", "0.3"]) == 0
    )
    shown = capsys.readouterr().out
    assert "Time on CUDA: arithmetic, never measured" in shown
    assert "8 GPUs at 10% to 30% MFU" in shown and "8 engines" in shown
