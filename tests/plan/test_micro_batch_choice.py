"""`policy.micro_batch_tokens: auto` and `policy.recompute: auto`: what a GPU's memory allows, from hand-made sums."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from ctpo_megatron.cli import main
from ctpo_megatron.config import Config, Job, PolicyConfig, load_config, read_shapes
from ctpo_megatron.plan import (
    GpuMemory,
    choices,
    settled,
)
from tests.support.prefork import ROOT

PAGE = (ROOT / "docs" / "reference" / "sizing.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Sums:
    """Of a recipe for one GPU, from the numbers of its config.json and the table of docs/parallelism.md.

    parameters: of the model. layer: bytes that a layer keeps of a token. kept: the same of all 28 layers, and what the
    backward pass of one adds. width: bytes of the residual stream of a token.
    """

    parameters: int
    layer: int
    width: int

    def update(self, tokens: int, recompute: str, rows: int) -> float:
        """GiB in an update with the sleeping engine, with so many rows of logits at a time."""
        state = 18 * self.parameters  # 2 of the weight, 4 of its gradient, 12 of AdamW
        kept = 29 * self.layer if recompute == "none" else 28 * self.width + 2 * self.layer - self.width
        head = 5 * self.width  # in and out of the norm, the rows used, gathered, and their gradient
        logits = 3 * rows * 151_936 * 4  # a chunk, and two that the allocator keeps
        return (state + tokens * (1.1 * kept + head) + logits) / 2**30 + 2

    def rows(self, tokens: int, recompute: str, gpu: int) -> int:
        """Of 2,432 MiB of logits, the half, a quarter or an eighth: the most of which four fit beside the trainer."""
        free = 0.9 * gpu - (self.update(tokens, recompute, 1) - 2)
        return next((rows for rows, mib in ((4096, 2432), (2048, 1216), (1024, 608)) if 4 * mib / 1024 <= free), 512)


# 16 heads of queries, 8 of keys and values, each of 128. A layer keeps, in bfloat16: four residual streams; q, k, v;
# normed q and k; the output and its log-sum-exp; local layers' copies of the output, q and v; three tensors of the MLP.
ATTENTION = 2 * 128 * ((16 + 8 + 8) + (16 + 8) + 16 + (16 + 16 + 8)) + 4 * 16
SMALL = Sums(596_049_920, 4 * 2048 + ATTENTION + 3 * 3072 * 2, 2048)
LARGE = Sums(1_720_574_976, 4 * 4096 + ATTENTION + 3 * 6144 * 2, 4096)
CHOSEN = {
    ("0_6b", 24): (43_008, "full", 1024),
    ("0_6b", 48): (17_408, "none", 1024),
    ("0_6b", 80): (34_816, "none", 1024),
    ("0_6b", 141): (65_536, "none", 2048),
    ("1_7b", 48): (34_816, "full", 1024),
    ("1_7b", 80): (14_336, "none", 2048),
    ("1_7b", 141): (36_864, "none", 2048),
}
"""Recipe, GiB of the card -> tokens, recomputation, rows of logits at a time."""


def recipe(model: str, *overrides: str) -> Config:
    return load_config(ROOT / "configs" / f"qwen3_{model}_one_gpu.yaml", list(overrides))


def dry_run(model: str, *words: str) -> int:
    shapes = ["--shapes", f"qwen3_{model}"]
    return main(["train", str(ROOT / "configs" / f"qwen3_{model}_one_gpu.yaml"), "--dry-run", "-v", *shapes, *words])


@pytest.mark.parametrize(("model", "gpu"), CHOSEN)
def test_the_largest_micro_batch_and_the_least_recomputation_that_fit(model: str, gpu: int) -> None:
    sums, (tokens, recompute, rows) = {"0_6b": SMALL, "1_7b": LARGE}[model], CHOSEN[model, gpu]
    spec = read_shapes(f"qwen3_{model}")
    best, _ = choices(GpuMemory(recipe(model), Job(1, 1), spec, gpu))
    assert (best.micro_batch_tokens, best.recompute, rows) == (tokens, recompute, sums.rows(tokens, recompute, gpu))
    assert best.bytes / 2**30 == pytest.approx(sums.update(tokens, recompute, rows), abs=0.01)
    assert sums.update(tokens, recompute, rows) <= 0.9 * gpu
    if tokens < 65_536:
        more = tokens + 1024
        assert sums.update(more, recompute, sums.rows(more, recompute, gpu)) > 0.9 * gpu
    longest = {"0_6b": 1024 + 4096, "1_7b": 9216}[model]  # 1,024 + 8,000 tokens, in multiples of 1,024
    if recompute == "full":
        assert sums.update(longest, "none", sums.rows(longest, "none", gpu)) > 0.9 * gpu
    cells = re.findall(
        rf"^\| Qwen3-{model.replace('_', '.').upper()}, {gpu} GiB \| ([\d,]+) \| (\w+) \| ([\d.]+) \|", PAGE, re.M
    )
    assert cells == [(f"{tokens:,}", recompute, f"{best.bytes / 2**30:.1f}")]


def test_the_dry_run_shows_the_choice_and_the_runner_up(capsys: pytest.CaptureFixture[str]) -> None:
    """The host launches 28 layers of a micro-batch in 8 ms each; 128 sequences of 512 + 2,048 tokens are expected."""
    assert dry_run("0_6b", "--cuda", "--gpu-gib", "48") == 0
    shown = capsys.readouterr().out
    (chosen,) = re.findall(r"chosen +(17,408 tokens, recompute: none) +(.*)", shown)
    seconds = 128 * 2560 / 17_408 * 28 * 0.008
    assert chosen[1] == f"42.5 GiB of 43.2 GiB in an update, about {seconds:.2g} s a step"
    assert re.search(
        r"runner-up +65,536 tokens, recompute: full +30\.7 GiB of 43\.2 GiB in an update, about 4\.7 s", shown
    )
    assert "17,408 tokens, 1 in flight, recomputed: nothing" in shown  # the table of memory is of the choice
    assert "  micro_batch_tokens: auto\n" in shown and "  recompute: auto\n" in shown  # the configuration keeps it


def test_what_does_not_fit_is_said_of_the_runner_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("1_7b", "--cuda", "--gpu-gib", "48") == 0
    assert re.search(r"runner-up +9,216 tokens, recompute: none +TOO MUCH: 54\.3 GiB", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"micro_batch_tokens": 9216}, (9216, "none")),
        ({"recompute": "full"}, (65_536, "full")),
        ({"micro_batch_tokens": 5120, "recompute": "selective"}, (5120, "selective")),
    ],
)
def test_what_is_given_stays(given: dict[str, Any], expected: tuple[int, str]) -> None:
    config = recipe("0_6b", *(f"policy.{key}={value}" for key, value in given.items()))
    best, runner_up = choices(GpuMemory(config, Job(1, 1), read_shapes("qwen3_0_6b"), 80))
    assert (best.micro_batch_tokens, best.recompute) == expected
    if given == {"recompute": "full"}:
        assert runner_up is not None and (runner_up.micro_batch_tokens, runner_up.recompute) == (64_512, "full")


def test_a_card_on_which_nothing_fits_is_refused_with_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """Sequences of 40,000 tokens: 18 bytes a parameter, and of each token 1.1 x 166,016 and 10,240, are 20 GiB."""
    longer = ["data.max_prompt_tokens=1000", "rollout.max_response_tokens=39000", "rollout.engine.max_model_len=40960"]
    assert dry_run("0_6b", "--cuda", "--gpu-gib", "24", *longer) == 0
    assert dry_run("0_6b", "--cuda", "--gpu-gib", "21", *longer) == 2
    assert re.search(r"GPU 0: 2[\d.]+ GiB of 21 GiB in an update \(trainer", capsys.readouterr().err)


@pytest.mark.parametrize(("card", "size"), [(["--gpu", "l4"], "22.5"), (["--gpu", "h200", "--gpu-gib", "20"], "20")])
def test_memory_is_that_of_the_named_card(card: list[str], size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("1_7b", *card) == 2
    assert f" of {size} GiB " in capsys.readouterr().err


def test_what_leaves_the_gpu_is_counted_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each parameter: 12 bytes of AdamW and 2 of the weight wait there, and once more in a checkpoint."""
    for offload, held in (("all", 28), ("optimizer", 26), ("none", 14)):
        assert dry_run("0_6b", "--gpu", "l4" if offload == "all" else "h200", f"policy.offload={offload}") == 0
        shown = capsys.readouterr().out.partition("Memory of a node's host")[2]
        (size,) = re.findall(r"1 trainer rank .* without a model \+ ([\d.]+) GiB: policy\.offload", shown)
        assert float(size) == pytest.approx(held * SMALL.parameters / 2**30, abs=0.05)
        assert re.search(r"1 engine .* 1\.1 GiB: weights while it sleeps", shown)


def test_stages_of_a_pipeline_have_micro_batches_to_fill_them() -> None:
    """Eight stages of a mini-batch of 128 sequences: larger micro-batches would wait longer than they save."""
    stages = "policy.pipeline_model_parallel_size"
    spec = read_shapes("qwen3_4b")
    tokens = {
        count: settled(recipe("0_6b", f"{stages}={count}"), Job(count, count), spec, 141).policy.chosen
        for count in (1, 4)
    }
    assert tokens[4].micro_batch_tokens < tokens[1].micro_batch_tokens
    assert 128 * 2560 / tokens[4].micro_batch_tokens > 2 * 4


def test_without_a_gpu_the_numbers_are_those_of_before() -> None:
    assert PolicyConfig().chosen == (8192, "none", None)
    assert recipe("0_6b").policy.chosen[:2] == (8192, "none")
