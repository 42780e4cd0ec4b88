"""Hours of a step and of a run, from stated speeds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ctpo_megatron import cli
from ctpo_megatron.config import Config
from ctpo_megatron.models import FAMILIES, ModelSpec
from ctpo_megatron.policy.device import known_peak
from ctpo_megatron.preflight import CARDS, Speeds, duration_table
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


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout as current folder, and no ranks."""
    monkeypatch.chdir(ROOT)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_the_peak_that_mfu_is_measured_against(name: str) -> None:
    assert CARDS[name].tflops * 1e12 == pytest.approx(known_peak(f"NVIDIA {name.upper()}", "bfloat16"), rel=1e-3)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--gpu", "l4"], ("measured, l4\n", "MFU of 121 TFLOP/s", "of 0.3 TB/s")),
        (["--gpu", "h200", "--gpu-gib", "90"], ("measured, h200\n", "MFU of 989 TFLOP/s", "of 4.8 TB/s")),
        (["--cuda"], ("measured, h100\n", "MFU of 989 TFLOP/s", "of 3.35 TB/s")),
        (["--gpu", "a100", "--peak-tflops", "300"], ("measured, a100\n", "MFU of 300 TFLOP/s", "of 2.039 TB/s")),
        (
            ["--gpu-gib", "90", "--peak-tflops", "50", "--decode", "90", "99"],
            ("measured\n", "MFU of 50 TFLOP/s", "90 to 99 tokens/s"),
        ),
        (
            ["--gpu-gib", "90"],
            ("Time on CUDA: not known from --gpu-gib alone; name the card: --gpu l4|a100|h100|h200",),
        ),
        (["--gpu-gib", "90", "--decode", "90", "99"], ("Time on CUDA: not known from --gpu-gib alone",)),
    ],
)
def test_times_are_of_the_card_that_is_named(
    words: list[str], shown: tuple[str, ...], checkout: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not known of a card is not taken from another one."""
    arguments = ["train", "configs/qwen3_0_6b_one_gpu.yaml", "--dry-run"]
    assert cli.main([*arguments, "--shapes", "configs/models/qwen3_0_6b.json", *words]) == 0
    out = capsys.readouterr().out
    assert "Memory of each GPU on CUDA" in out and "on a CPU" not in out
    assert all(text in out for text in shown)
    assert ("TFLOP/s" in out) == (len(shown) > 1)


@pytest.mark.parametrize(("card", "size"), [(["--gpu", "l4"], "22.5"), (["--gpu", "h200", "--gpu-gib", "20"], "20")])
def test_memory_is_that_of_the_card(
    card: list[str], size: str, checkout: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "configs/qwen3_1_7b_one_gpu.yaml", "--dry-run", *card]
    assert cli.main([*arguments, "--shapes", "configs/models/qwen3_1_7b.json"]) == 2
    assert f" of {size} GiB " in capsys.readouterr().err


def test_the_dry_run_says_that_nothing_was_measured(checkout: None, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["--shapes", "configs/models/qwen3_4b.json", "--dry-run", "--cuda"]
    assert (
        cli.main(["train", "configs/qwen3_4b_tir.yaml", "configs/nodes_2x8.yaml", *shapes, "--mfu", "0.1", "0.3"]) == 0
    )
    shown = capsys.readouterr().out
    assert "Time on CUDA: arithmetic, never measured" in shown
    assert "8 GPUs at 10% to 30% MFU" in shown and "8 engines" in shown
