"""Sends every token of a mixture of experts to the experts that the engine sent it to (megatron-core's routing replay).

Where two experts are nearly level, rounding decides, and sampler and trainer decide differently. The trainer's log-prob
is then of another model than the one that sampled. With the engine's choices both compute the same experts; the weights
of these are still of the trainer's router, which keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from ctpo_megatron.base.host_copies import to_device
from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.data import DataError, PackedBatch, TokenSequence
from ctpo_megatron.data.tokens import ROUTER_CHOICES, recorded
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.policy.context import ContextSplit
from ctpo_megatron.policy.parallel import gather_objects


@dataclass(frozen=True)
class Choices:
    """The engine's choices for the rows that this rank routes in one micro-batch.

    experts: `[n, layers, choices]` of the engine's type. known: bool `[n]`. compared: how many of them the live
    router's choices are compared with, all or 0.
    """

    experts: Tensor
    known: Tensor
    compared: int


class ReplayedRouter:
    """What the router of one layer asks for its experts (stands for megatron-core's `RouterReplay`).

    Megatron's own replays one list of indices for all rows, and needs to be told before each backward pass that layers
    are computed again. Here a row without a record is routed live, and a layer that is computed again is known by its
    gradients: under recomputation they are off in the first pass, and on in the second. Backward passes of a layer come
    in the order of its forward passes, in every pipeline schedule.

    layer: from 0, of the whole model. recomputed: whether training computes the router again in the backward pass.
    """

    def __init__(self, layer: int, *, recomputed: bool) -> None:
        self._layer, self._recomputed = layer, recomputed
        self.choices: Choices | None = None
        self.training = False
        self._again: list[Choices | None] = []
        self._agreed: list[Tensor] = []
        self._compared = 0

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and experts `[n, topk]` of each row, from live scores `[n, experts]`; differentiable in the scores."""
        assert default_compute_topk is not None  # megatron passes its own
        first = True
        if self._recomputed and self.training:
            first = not torch.is_grad_enabled()
            if first:
                self._again.append(self.choices)
        if not first and not self._again:
            raise RuntimeError(f"layer {self._layer} is computed again more often than once")
        choices = self.choices if first else self._again.pop(0)
        values, live = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if choices is None:
            return values, live
        engine = choices.experts[:, self._layer].long()
        if len(engine) != len(scores):
            raise RuntimeError(f"layer {self._layer} routes {len(scores)} rows, and choices are of {len(engine)}")
        if first and choices.compared:
            same = (engine.sort(dim=1).values == live.sort(dim=1).values).all(dim=1)
            self._agreed.append((same & choices.known).sum())
            self._compared += choices.compared
        experts = torch.where(choices.known[:, None], engine, live)
        return scores.gather(1, experts), experts

    def take_agreement(self) -> tuple[list[Tensor], int]:
        """Numbers of rows whose live choices were the engine's, and how many were compared, since the last call."""
        found = self._agreed, self._compared
        self._agreed, self._compared = [], 0
        return found

    def reset(self) -> int:
        """Forget the micro-batches of a schedule. Returns how many passes were not computed again."""
        left, self._again = len(self._again), []
        self.choices, self.training = None, False
        return left


class RouterReplays:
    """The replay of all routers of this rank; made once for a model, before its first pass."""

    def __init__(self, routers: Sequence[ReplayedRouter], *, sequence_parallel: bool) -> None:
        self._routers, self._sequence_parallel = routers, sequence_parallel
        self._tokens = self._unrecorded = 0

    @classmethod
    def install(cls, chunks: Iterable[torch.nn.Module], policy: PolicyConfig) -> RouterReplays:
        """Replace megatron-core's `RouterReplay` in each router of these model chunks."""
        recomputed = policy.chosen.recompute == "full" or (
            policy.chosen.recompute == "selective" and "moe" in policy.recompute_modules
        )
        replayed = []
        for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            assert router.router_replay is not None and router.layer_number is not None  # moe_enable_routing_replay
            router.router_replay = ReplayedRouter(router.layer_number - 1, recomputed=recomputed)
            replayed.append(router.router_replay)
        RouterReplay.clear_global_router_replay_instances()  # nothing is left that they are of
        return cls(replayed, sequence_parallel=policy.sequence_parallel)

    @contextmanager
    def schedule(self, *, training: bool) -> Iterator[None]:
        """Around all passes of a schedule. training: with backward passes.

        Raises RuntimeError when layers were not computed again as often as their backward passes need.
        """
        for router in self._routers:
            router.training = training
        try:
            yield
        except BaseException:
            self._reset()
            raise
        if left := self._reset():
            raise RuntimeError(f"{left} passes of routers were not computed again: another recomputation than expected")

    def _reset(self) -> int:
        return sum([router.reset() for router in self._routers])

    def start(self, batch: PackedBatch, split: ContextSplit) -> None:
        """Before the forward pass of a model chunk over this micro-batch."""
        choices = self._choices(batch, split)
        for router in self._routers:
            router.choices = choices

    def _choices(self, batch: PackedBatch, split: ContextSplit) -> Choices | None:
        """Copied to the device for one micro-batch at a time: all of a step may be a gigabyte."""
        column = batch.on_host.more.get(ROUTER_CHOICES)
        if column is None:
            if batch.on_policy:
                self._count(batch, torch.zeros(batch.num_tokens, dtype=torch.bool), torch.arange(batch.num_tokens))
            return None
        rows = split.on_host.take(torch.arange(batch.num_tokens))
        if self._sequence_parallel:
            rows = rows.chunk(mpu.get_tensor_model_parallel_world_size())[mpu.get_tensor_model_parallel_rank()]
        choices = column.numpy()[rows.numpy()]
        experts, known = torch.from_numpy(choices), torch.from_numpy(recorded(choices))
        if batch.on_policy:
            self._count(batch, known, rows)
        device, compared = batch.token_ids.device, int(known.sum()) if batch.on_policy else 0
        return Choices(to_device(experts, device), to_device(known, device), compared)

    def _count(self, batch: PackedBatch, known: Tensor, rows: Tensor) -> None:
        """Tokens that a sampled token follows: no other reaches a log-prob, and the engine read these alone."""
        read, sampled = torch.zeros(batch.num_tokens, dtype=torch.bool), batch.on_host.response_mask
        for _, tokens in batch.places():
            if (last := sampled[tokens].nonzero()).numel():
                read[tokens.start : tokens.start + int(last[-1])] = True
        self._tokens += int(read[rows].sum())
        self._unrecorded += int((read[rows] & ~known).sum())

    def take_metrics(self) -> dict[str, float]:
        """Of the passes since the last call whose log-probs are the old ones; the same on every rank. Collective."""
        agreements, numbers = zip(*(router.take_agreement() for router in self._routers), strict=True)
        counted = [count for of_layer in agreements for count in of_layer]
        agreed = int(torch.stack(counted).sum()) if counted else 0  # the one read-back of a step
        own = (agreed, sum(numbers), self._unrecorded, self._tokens)
        self._tokens = self._unrecorded = 0
        agreed, compared, unrecorded, tokens = map(sum, zip(*gather_objects(own), strict=True))
        metrics = {"mismatch/router_agreement": agreed / compared} if compared else {}
        return metrics | ({"mismatch/router_unrecorded": unrecorded / tokens} if tokens else {})


def checked_choices(sequences: list[TokenSequence], spec: ModelSpec) -> list[TokenSequence]:
    """Return the sequences. Raises DataError for choices of another model than `spec`: they would be other experts."""
    expected = (spec.num_layers, spec.num_experts_per_token)
    for sequence in sequences:
        if ROUTER_CHOICES not in (sequence.kind.names or ()):
            continue
        choices = sequence.records[ROUTER_CHOICES]
        if choices.shape[1:] != expected or int(choices.max(initial=0)) >= spec.num_experts:
            raise DataError(
                f"trajectory {sequence.name} has router choices of {choices.shape[1]} layers x {choices.shape[2]}, up "
                f"to expert {int(choices.max(initial=0))}, but the model has {spec.num_layers} layers with "
                f"{spec.num_experts_per_token} of {spec.num_experts} experts: was it recorded with another model?"
            )
    return sequences
