"""What a rank rehearses: everything that training asks of a policy, once, on claimed devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ctpo_megatron.config import CorrectionConfig, OptimizerConfig, PolicyConfig, RejectConfig
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import (
    MiniBatch,
    Trainer,
    apply_correction,
    destroy_distributed,
    device,
    gather_objects,
    init_distributed,
    policy_gradient,
)
from ctpo_megatron.policy.passes import Passes
from ctpo_megatron.verify.batch import record_experts
from tests.policy import models, te_layers
from tests.rehearsal import fused_adam, synchronizations
from tests.rehearsal.cases import Case, Report
from tests.rehearsal.synchronizations import phase

Weights = dict[str, torch.Tensor]
OBJECTIVE = PolicyObjective.preset("ctpo")
CORRECTION = CorrectionConfig(
    level="prefix",
    normalize=True,
    reject=(RejectConfig(stat="k1", over="token", high=3.0), RejectConfig(stat="k3", over="sequence_max", high=100.0)),
    veto=1e-4,
)


def config_of(case: Case) -> PolicyConfig:
    return PolicyConfig(
        timeout_minutes=2.0,
        micro_batch_tokens=256,
        dtype=case.dtype,
        head=case.head,
        head_chunk_tokens=None if case.dtype == "float32" else 32,  # several chunks a micro-batch
        use_distributed_optimizer=case.distributed,
        offload="all" if case.dtype != "float32" and case.distributed else "none",
        **case.layout,
    )


def rehearse(case: Case, model: Path, folder: Path) -> Report:
    """One case on this rank. Raises whatever CUDA's rules refuse, and AssertionError for what came out wrong."""
    fused_adam.install(case.adam)
    if case.te_layers:
        te_layers.install()
    layout = init_distributed(config_of(case), seed=0)
    try:
        assert device.CUDA and layout.device == torch.device("cuda", layout.rank)
        with _passes_counted() as counted:
            before, first, second = _train(_new_policy(case, layout, model), folder)
        counts = synchronizations.counted()
        resumed = _new_policy(case, layout, model)
        assert resumed.load(folder / "step_000001") == {"step": 1}
        _same(first, _weights(resumed))
        _same(second, _update(1, resumed))
        assert resumed.load(folder / "step_000000") == {"step": 0}
        _same(before, _weights(resumed))
        _same(first, _update(0, resumed))
        _check_export(resumed, folder, is_rank_zero=layout.is_rank_zero)
        if case.te_layers:
            _check_sharing(case, resumed, model)
    finally:
        destroy_distributed()
    return Report(counts, counted)


def _new_policy(case: Case, layout: Any, model: Path) -> Trainer:
    new = Trainer(config_of(case), layout, model, temperature=0.9)
    new.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=4)
    assert {parameter.device for chunk in new._model.gpt for parameter in chunk.parameters()} == {layout.device}
    return new


def _mini_batch(step: int, on: Trainer) -> MiniBatch:
    trajectories = models.trajectories(8, seed=step, groups=True)
    if on.config.router_replay:
        record_experts(trajectories, on.spec)
    found = on.distribute(trajectories, models.advantages(8), size=8)
    return found[0]


def _update(step: int, on: Trainer) -> Weights:
    """One optimizer step with everything around it, and the weights after it."""
    batch = _mini_batch(step, on)
    with phase("old log-probs"):
        on.compute_old_log_probs([batch])
        apply_correction([batch], CORRECTION, on.layout, OBJECTIVE)
    with phase("update"):
        on.update(batch, policy_gradient(OBJECTIVE, "decoupled"))
    on.release()
    return _weights(on)


def _weights(on: Trainer) -> Weights:
    return {name: tensor.cpu() for name, tensor in on.weights()}


def _train(on: Trainer, folder: Path) -> list[Weights]:
    """Before training, after one step and after two, with a checkpoint of the first two moments."""
    before = _weights(on)
    on.save(folder, 0, {"step": 0})
    first = _update(0, on)
    on.save(folder, 1, {"step": 1})
    second = _update(1, on)
    batch = _mini_batch(0, on)
    with phase("old log-probs"):
        on.compute_old_log_probs([batch])
    with phase("diagnostics"):
        on.token_diagnostics(batch, OBJECTIVE)
    return [before, first, second]


def _same(expected: Weights, found: Weights) -> None:
    assert expected.keys() == found.keys()
    different = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert not different, f"a resumed run goes on otherwise: {different}"


def _check_export(on: Trainer, folder: Path, *, is_rank_zero: bool) -> None:
    """The directory that is exported holds the weights as they are."""
    on.export(folder / "export")
    weights = {name: tensor.cpu().clone() for name, tensor in on.weights()}
    if is_rank_zero:
        _same(weights, load_file(folder / "export" / "model.safetensors"))


def _check_sharing(case: Case, on: Trainer, model: Path) -> None:
    """Log-probs of the model with tokens of the same history computed once, and without."""
    found = []
    for share in ("auto", "off"):
        config = config_of(case).model_copy(update={"share_prefixes": share})
        policy = Trainer(config, on.layout, model, temperature=0.9)
        batch = _mini_batch(0, policy)
        assert all((micro.forest is not None) == (share == "auto") for micro in batch.micro_batches)
        policy.compute_old_log_probs([batch])
        micro_batches = batch.micro_batches
        own = {place: micro.old_log_probs[at].cpu() for micro in micro_batches for place, at in micro.places()}
        found.append({place: values for rank in gather_objects(own) for place, values in rank.items()})
    for place, log_probs in found[1].items():
        assert torch.allclose(found[0][place], log_probs, atol=0.05), (place, found[0][place] - log_probs)


@contextmanager
def _passes_counted() -> Iterator[dict[str, list[int]]]:
    """Micro-batches of each call of the schedule, by phase."""
    counted: dict[str, list[int]] = defaultdict(list)
    original = Passes._run

    def run(self: Passes, batches: Sequence[PackedBatch], *args: Any, **kwargs: Any) -> Any:
        counted[synchronizations.current()].append(len(batches))
        return original(self, batches, *args, **kwargs)

    Passes._run = run  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        Passes._run = original  # type: ignore[method-assign]
