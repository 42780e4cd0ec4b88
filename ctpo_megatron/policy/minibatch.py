"""Splits the sequences of a training step into optimizer steps, and each step into this rank's packed micro-batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ctpo_megatron.config import PolicyConfig, sequence_multiple
from ctpo_megatron.data import (
    DataError,
    PackedBatch,
    PackingRules,
    TokenSequence,
    Trajectory,
    micro_batch_count,
    pack,
    split_evenly,
    token_sequences,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.objective import Denominators
from ctpo_megatron.policy.exchange import share_tokens, tokens_of
from ctpo_megatron.policy.flops import sequence_flops
from ctpo_megatron.policy.parallel import Layout
from ctpo_megatron.policy.workload import Workload, padded_tokens


@dataclass
class MiniBatch:
    """The data of one optimizer step: this rank's micro-batches, denominators over all ranks, and its size.

    `apply_correction` changes loss masks and denominators together.
    """

    micro_batches: list[PackedBatch]
    denominators: Denominators
    work: Workload


def checked_sequences(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    vocab_size: int,
    version: int | None = None,
) -> list[TokenSequence]:
    """The tokens of every trajectory.

    Raises ValueError as `token_sequences` does and when there is not one advantage for each. Raises DataError for a
    token outside the vocabulary: megatron pads the vocabulary, and would train on the padding rows.
    """
    if len(advantages) != len(trajectories):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories")
    sequences = token_sequences(trajectories, version)
    for sequence in sequences:
        ids = tokens_of(sequence).token_ids
        beyond = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if beyond.size:
            at = int(beyond[0])
            raise DataError(
                f"trajectory {sequence.name} has token id {ids[at]} at position {at}, but the model's vocabulary has "
                f"{vocab_size} (vocab_size in config.json): were the tokens made with the tokenizer of this model?"
            )
    return sequences


def make_mini_batches(
    sequences: Sequence[TokenSequence],
    advantages: Sequence[float],
    *,
    size: int,
    config: PolicyConfig,
    layout: Layout,
    spec: ModelSpec,
    padded_attention: bool,
    skip_zero_advantage: bool = False,
) -> list[MiniBatch]:
    """Consecutive runs of `size` sequences, one per optimizer step, each distributed over data-parallel ranks.

    sequences, advantages: from `share_sizes`. Rank zero sends the tokens to the ranks that train on them. Shares are
    balanced by model FLOPs. skip_zero_advantage: sequences whose advantage is 0 are in the denominators but in no
    micro-batch. A rank without any sequence runs one masked sequence.
    padded_attention: attention pads within length classes (the local layer spec), which counts as computed tokens.
    Raises ValueError when an optimizer step has fewer sequences than there are data-parallel ranks. Collective.
    """
    rules = packing_rules(config)
    result = []
    for start in range(0, len(sequences), size):
        began = time.perf_counter()
        chunk, values = sequences[start : start + size], advantages[start : start + size]
        if len(chunk) < layout.dp_size:
            raise ValueError(f"an optimizer step of {len(chunk)} trajectories cannot feed {layout.dp_size} replicas")
        flops = sequence_flops(spec, chunk)
        # Not `abs(a) > 0`: a NaN has to reach the loss.
        trained = [i for i, value in enumerate(values) if not (skip_zero_advantage and value == 0)]
        # Every rank computes all shares: they follow from the sizes alone, so no communication is needed.
        parts = split_evenly([chunk[i] for i in trained], layout.dp_size, [flops[i] for i in trained])
        shares = [[trained[i] for i in part] for part in parts]
        own = share_tokens(chunk, shares, layout)
        at_least = _equal_count(chunk, shares, rules) if layout.ep_size > 1 else 1
        packed = pack(own, [values[i] for i in shares[layout.dp_rank]], rules, at_least=at_least)
        denominators = Denominators.of_counts(sequence.loss_tokens for sequence in chunk)
        micro_batches = [micro.to(layout.device) for micro in packed]
        loads = [sum(flops[i] for i in share) for share in shares]
        work = Workload(
            tokens=sum(map(len, chunk)),
            flops=sum(flops),
            trained_tokens=sum(len(chunk[i]) for i in trained),
            trained_flops=sum(loads),
            imbalance=max(loads) * layout.dp_size / sum(loads) if trained else 1.0,
            computed_tokens=sum(padded_tokens(m.cu_seqlens) if padded_attention else m.num_tokens for m in packed),
            packing_s=time.perf_counter() - began,
        )
        result.append(MiniBatch(micro_batches, denominators, work))
    return result


def packing_rules(config: PolicyConfig) -> PackingRules:
    """What the layout requires of micro-batches: equal pieces for context parallelism, equal shares for sequence
    parallelism, whole rounds for virtual pipeline stages."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    return PackingRules(
        max_tokens=config.micro_batch_tokens * cp,
        sequence_multiple=sequence_multiple(config),
        batch_multiple=cp * tp if config.sequence_parallel else 1,
        count_multiple=config.pipeline_model_parallel_size if config.virtual_pipeline_model_parallel_size else 1,
    )


def _equal_count(chunk: Sequence[TokenSequence], shares: Sequence[Sequence[int]], rules: PackingRules) -> int:
    """Micro-batches of the replica that needs most: to exchange experts' tokens, replicas run the same passes."""
    return max(1, *(micro_batch_count([chunk[i] for i in share], rules) for share in shares))
