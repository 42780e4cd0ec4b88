"""Checkpoints of a real policy on one rank: what is restored, what is refused, and saving in the background."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import random
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.policy import (
    CheckpointError,
    CheckpointWriteError,
    Layout,
    Trainer,
    checkpoint,
)
from tests.policy import models
from tests.policy.stepping import has_weights, step, weights
from tests.support.deadlines import scaled

ASYNCHRONOUS = CheckpointConfig(asynchronous=True)
LINEAR = OptimizerConfig(lr=1e-3, schedule="linear")


Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def make(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a trainer of a small model."""
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3-tied", "qwen3-untied", "llama"):
        models.build(family, root / family, layers=2)

    def made(
        model: str | Path = "qwen3-tied",
        optimizer: OptimizerConfig = LINEAR,
        total_steps: int = 20,
        **settings: Any,
    ) -> Trainer:
        policy = Trainer(PolicyConfig(micro_batch_tokens=256, **settings), layout, root / model, temperature=0.9)
        policy.use_optimizer(optimizer, total_steps)
        return policy

    return made


BOTH_OPTIMIZERS = pytest.mark.parametrize("distributed", [pytest.param(False, marks=pytest.mark.slow), True])
"""The distributed one in `make test`: it is the one of a cluster, and has more to keep."""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"use_distributed_optimizer": True},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_the_beginning_goes_on_like_the_run(make: Make, tmp_path: Path, settings: Any) -> None:
    policy = make(**settings)
    path = policy.save(tmp_path, 0, {"step": 0})
    norms = [step(policy, seed).grad_norm for seed in (1, 2)]
    resumed = make(**settings)
    assert resumed.load(path) == {"step": 0}
    assert [step(resumed, seed).grad_norm for seed in (1, 2)] == norms
    assert has_weights(resumed, weights(policy))


def test_saving_in_the_background_saves_the_moment_it_was_asked(make: Make, tmp_path: Path) -> None:
    policy = make()
    step(policy, seed=1)
    synchronous = policy.save(tmp_path / "synchronous", 1, {"step": 1})
    path = policy.save(tmp_path, 1, {"step": 1}, ASYNCHRONOUS)
    assert synchronous.exists() and not path.exists()
    norm = step(policy, seed=2).grad_norm  # changes the weights while they are being written
    policy.finish_save()
    for saved in (path, synchronous):
        resumed = make()
        resumed.load(saved)
        assert step(resumed, seed=2).grad_norm == norm
        assert has_weights(resumed, weights(policy))


def test_a_save_in_the_background_completes_by_itself_or_with_the_next(make: Make, tmp_path: Path) -> None:
    policy = make()
    first = policy.save(tmp_path, 1, {"step": 1}, ASYNCHRONOUS)
    second = policy.save(tmp_path, 2, {"step": 2}, ASYNCHRONOUS)
    assert first.exists() and not second.exists()
    deadline = time.monotonic() + 60
    while not second.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
        policy.finish_save(wait=False)
    assert second.exists()


@BOTH_OPTIMIZERS
def test_a_resumed_run_follows_the_configuration_it_is_given(make: Make, tmp_path: Path, distributed: bool) -> None:
    first = OptimizerConfig(lr=1e-3, min_lr=0.0, schedule="constant", weight_decay=0.1)
    path = make(optimizer=first, use_distributed_optimizer=distributed).save(tmp_path, 1, {"step": 1})
    other = OptimizerConfig(lr=1e-5, min_lr=1e-6, schedule="constant", weight_decay=0.0, betas=(0.8, 0.9), eps=1e-6)
    resumed = make(optimizer=other, use_distributed_optimizer=distributed)
    resumed.load(path)
    assert step(resumed, seed=1).learning_rate == 1e-5
    for group in resumed._steps.optimizer.param_groups:
        assert (group["lr"], group["min_lr"], tuple(group["betas"]), group["eps"]) == (1e-5, 1e-6, (0.8, 0.9), 1e-6)
        assert group["weight_decay"] == 0


@BOTH_OPTIMIZERS
def test_every_parameter_has_a_step_counter_of_its_own(make: Make, tmp_path: Path, distributed: bool) -> None:
    """AdamW adds one to each: a counter that parameters share would advance once per parameter."""
    policy, resumed = (make(use_distributed_optimizer=distributed) for _ in range(2))
    step(policy)
    resumed.load(policy.save(tmp_path, 1, {"step": 1}))
    optimizers = [part.optimizer for part in resumed._steps.optimizer.chained_optimizers]
    counters = [state["step"] for optimizer in optimizers for state in optimizer.state.values()]
    assert len({counter.data_ptr() for counter in counters}) == len(counters) > 1
    step(resumed, seed=1)
    assert {counter.item() for counter in counters} == {2.0}


def test_the_schedule_goes_on_where_the_run_stands(make: Make, tmp_path: Path) -> None:
    policy = make()
    for seed in range(10):
        step(policy, seed)
    path = policy.save(tmp_path, 5, {"step": 5})
    rate = policy._steps.optimizer.param_groups[0]["lr"]
    for total_steps in (20, 10):  # or half as many a step
        resumed = make(total_steps=total_steps)
        resumed.load(path)
        resumed.set_scheduler_step(5 / 10)
        assert resumed._steps.optimizer.param_groups[0]["lr"] == pytest.approx(rate) == pytest.approx(5e-4)
        assert total_steps == 10 or resumed._steps.optimizer.param_groups[0]["lr"] == rate
    smaller = make()
    step(smaller)  # nine other mini-batches were dropped
    smaller._steps.skip(9)  # as `train` does with a batch that is smaller than planned
    assert smaller._steps.optimizer.param_groups[0]["lr"] == rate


def test_a_trainer_ends_with_its_last_reference(make: Make, tmp_path: Path) -> None:
    """What a callback at exit keeps may end in a process that writes, which clears its parent's from Python 3.12 on.

    The store of a job of several ranks crashed there.
    """
    policy = make()
    policy.save(tmp_path, 1, {"step": 1})
    writer = weakref.ref(policy._checkpoints)
    del policy
    gc.collect()
    assert writer() is None


@pytest.mark.parametrize("limit", [1000, 100_000], ids=["the rest", "a shard"])
def test_a_full_disk_is_named(
    make: Make,
    tmp_path: Path,
    limit: int,
    file_limit: Callable[[int], AbstractContextManager[None]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    policy = make()
    shown = logging.StreamHandler(sys.stderr)  # as without pytest's own handler
    logging.getLogger().addHandler(shown)
    try:
        with file_limit(limit), pytest.raises(CheckpointError) as caught:
            policy.save(tmp_path, 1, {"step": 1})
    finally:
        logging.getLogger().removeHandler(shown)
    text = str(caught.value)
    assert text.startswith(f"a checkpoint could not be written to {tmp_path}: ") and "GiB were free there" in text
    assert "a file could not be written to its end: the disk is full, or a quota or limit is reached" in text
    assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []  # what was written of it would keep the disk full
    assert "encountered an error" not in capfd.readouterr().err  # torch's words, from the process that writes


def test_a_writer_that_cannot_write_is_reported(make: Make, tmp_path: Path) -> None:
    policy = make()
    policy.save(tmp_path, 1, {"step": 1}, ASYNCHRONOUS)
    (process,) = [call.async_caller.process for call in policy._checkpoints._queue.async_calls]
    process.kill()
    with pytest.raises(CheckpointWriteError, match=r"could not be written.*a process that writes ended.*was it killed"):
        policy.finish_save()
    assert list(tmp_path.glob("step_*")) == []
    policy.save(tmp_path, 1, {"step": 1})  # another one may begin
    assert list(tmp_path.glob("step_*"))


def test_a_writer_that_hangs_is_discarded_and_does_not_outlive_the_job(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", lambda *_, **__: time.sleep(10))
    policy = make(timeout_minutes=0.005)
    policy.save(tmp_path, 1, {"step": 1}, ASYNCHRONOUS)
    with pytest.raises(
        CheckpointError, match=r"not done after 0\.3 s \(policy\.timeout_minutes\).*was one of them killed"
    ):
        policy.finish_save()
    (process,) = [call.async_caller.process for call in policy._checkpoints._queue.async_calls]
    checkpoint._abandon(policy._checkpoints._queue)
    process.join(timeout=scaled(5))
    assert not process.is_alive()


def test_the_process_that_keeps_what_writers_tell_has_no_torch(make: Make, tmp_path: Path) -> None:
    """Two CPU-seconds and 250 MB of every rank, for nothing."""
    make().save(tmp_path, 1, {"step": 1})
    (keeper,) = [child for child in multiprocessing.active_children() if child.name.startswith("SyncManager")]
    assert not [file.path for file in psutil.Process(keeper.pid).memory_maps() if "torch" in file.path]


def test_attached_files_are_those_of_rank_zero_and_checked(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make()
    path = policy.save(tmp_path, 1, {"step": 1}, attached={"ahead.json.gz": lambda: b"groups"})
    assert not caplog.records  # megatron would warn of a folder that is not empty
    assert (path / "ahead.json.gz").read_bytes() == b"groups" and policy.load(path) == {"step": 1}
    (path / "ahead.json.gz").write_bytes(b"grapes")
    with pytest.raises(CheckpointError, match=r"ahead\.json\.gz does not have the contents that were written"):
        policy.load(path)


def test_random_streams_go_on_where_they_stood(make: Make, tmp_path: Path) -> None:
    policy = make()

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    draw()
    path = policy.save(tmp_path, 1, {"step": 1})
    expected = draw()
    draw()
    policy.load(path)
    assert draw() == expected


def test_a_broken_file_is_named_before_anything_changes(make: Make, tmp_path: Path) -> None:
    policy = make()
    older, path = (policy.save(tmp_path, n, {"step": n}) for n in (1, 2))
    broken = path / "__0_0.distcp"
    data = broken.read_bytes()
    broken.write_bytes(data[:-1])
    step(policy, seed=1)
    before = weights(policy)
    with pytest.raises(CheckpointError) as caught:
        policy.load(path)
    assert f"__0_0.distcp has {len(data) - 1} bytes instead of {len(data)}" in str(caught.value)
    assert str(caught.value).endswith(f"continue from it with checkpoint.load={older}")
    broken.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp does not have the contents that were written"):
        policy.load(path)
    assert has_weights(policy, before)


def test_another_model_is_refused_with_every_difference(make: Make, tmp_path: Path) -> None:
    path = make().save(tmp_path, 1, {"step": 1})
    other = make("qwen3-untied")
    before = weights(other)
    with pytest.raises(CheckpointError) as caught:
        other.load(path)
    text = str(caught.value)
    assert "\n  output_layer.weight is not in the checkpoint" in text
    assert "linear_qkv.weight is float32 2x192x96 in the checkpoint and float32 2x256x96 here" in text
    assert "optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight is float32 2x192x96" in text
    assert has_weights(other, before)
    with pytest.raises(CheckpointError, match=r"q_layernorm\.weight is not in this model and optimizer"):
        make("llama").load(path)


def test_another_precision_or_optimizer_is_refused(make: Make, tmp_path: Path) -> None:
    path = make().save(tmp_path, 1, {"step": 1})
    for settings, message in (
        ({"dtype": "bfloat16"}, r"policy\.dtype was float32 and is bfloat16"),
        ({"use_distributed_optimizer": True}, r"policy\.use_distributed_optimizer was False and is True"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make(**settings).load(path)
    assert make().load(path) == {"step": 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e3}},
            r"rope_theta of model\.path was 10000\.0 and is 7",
        ),
        ({"rms_norm_eps": 1e-3}, r"rms_norm_eps of model\.path was 1e-06 and is 0\.001"),
    ],
)
def test_a_model_that_computes_something_else_with_the_same_tensors_is_refused(
    make: Make, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = make().save(tmp_path / "checkpoints", 1, {"step": 1})
    models.build("qwen3-tied", tmp_path / "other", layers=2)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | changed))
    other = make(tmp_path / "other")
    for load in (other.load, other.load_weights):
        with pytest.raises(CheckpointError, match=message):
            load(path)


def test_weights_of_another_precision_are_converted(make: Make, tmp_path: Path) -> None:
    policy = make()
    step(policy, seed=1)
    path = policy.save(tmp_path, 1, {"step": 1})
    other = make(dtype="bfloat16")
    other.load_weights(path)
    assert has_weights(other, {name: tensor.bfloat16() for name, tensor in weights(policy).items()})


@BOTH_OPTIMIZERS
def test_what_decays_is_what_is_configured(make: Make, tmp_path: Path, distributed: bool) -> None:
    """A step whose gradients are all zero leaves the decay alone: weight * (1 - lr * weight_decay)."""
    found, paths = {}, {}
    for rule in ("matrices", "all"):
        config = OptimizerConfig(lr=0.5, weight_decay=0.5, weight_decay_of=rule)
        policy = make(optimizer=config, use_distributed_optimizer=distributed)
        before = weights(policy)
        step(policy, advantages=[0.0] * 16)
        found[rule] = {name for name, tensor in policy.weights() if torch.equal(tensor, before[name] * 0.75)}
        paths[rule] = policy.save(tmp_path / rule, 1, {"step": 1})
    assert found["all"] == set(before)
    assert found["matrices"] == {name for name, tensor in before.items() if tensor.dim() > 1}
    with pytest.raises(CheckpointError, match=r"optimizer\.weight_decay_of was matrices and is all"):
        policy.load(paths["matrices"])
