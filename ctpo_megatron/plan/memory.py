"""Memory of a trainer rank: weights, gradients, optimizer state and activations; and of an engine's KV cache. No torch.

Sizes of a rank are for Megatron-Core 0.16 on CUDA with Transformer Engine. Weights, gradients and optimizer state are
exact up to the padding of gradient buffers. Activations follow Korthikanti et al., arXiv 2205.05198, for a layer with
flash attention, grouped-query attention, RMSNorm and a gated MLP, without dropout. An upper bound of temporary memory
of the backward pass is included, and what torch's allocator keeps beyond what is allocated. Not included: the CUDA
context and NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from ctpo_megatron.config import Config, Job, PolicyConfig, Problem, against_shared_prefixes, engine_count, error
from ctpo_megatron.models import LayerSplit, ModelSpec, padded_vocabulary

TableRow = tuple[str, str, str]
"""Quantity, value, how it follows from the configuration."""

MIB, GIB = 1 << 20, 1 << 30
CARD_GIB = {"l4": 22.5, "a100": 80, "h100": 80, "h200": 140}
"""Memory that the driver shows."""
USUAL_CARD = "h100"
GPU_GIB = CARD_GIB[USUAL_CARD]
"""The GPU of the tables."""

USABLE = 0.9
"""Usable share of a GPU; the rest is for the CUDA context and NCCL."""

KEPT_BLOCKS, KEPT_SHARE = 2, 0.1
"""What torch's allocator keeps beyond what is allocated: blocks of the size of a chunk of logits, the largest tensor,
and a share of the activations. Micro-batches differ in length, so that freed blocks do not fit the next tensors.

Two blocks are fitted to what was measured with full recomputation, GiB at the peak of updates (benchmarks/results/gpu).
The share is an assumption, there of at most 0.3 GiB.

| model, tokens of a micro-batch, GPU | allocated | planned | with what is kept | reserved | of the plan |
|---|---:|---:|---:|---:|---:|
| Qwen3-0.6B, 5,120, H100 | 12.56 | 13.15 | 17.87 | 17.86 | 1.00 |
| Qwen3-0.6B, 5,120, H200 | 12.56 | 13.15 | 17.87 | 18.85 | 1.05 |
| Qwen3-1.7B, 10,240, H100 | 32.58 | 33.98 | 38.87 | 35.62 | 0.92 |
| Qwen3-1.7B, 10,240, H200 with an AdamW that took 2.8 more | 35.40 | 33.98 | 38.87 | 38.98 | 1.00 |
"""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAIN_GRADIENT = 4
# As `ctpo_kernels` has them (`ctpo_kernels.chunks`), which a login node lacks; a test compares the two.
DEFAULT_CHUNK = 1216 << 20
"""Bytes of float32 logits of one chunk on a GPU."""
_CHUNK_SIZES = tuple(DEFAULT_CHUNK * 2 // 2**halved for halved in range(4))
_CHUNK_SHARE = 4
_CHUNK_TILE = 128
SHARE = 0.5
"""Of a CPU machine's free memory, for the caches of its engines; weights, the trainer and programs have the rest."""
_BLOCK = 32
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Split:
    """How the model and a micro-batch are split over ranks, and what is kept between forward and backward.

    micro_batch_tokens: of one context-parallel rank. head_chunk_tokens: rows of logits at a time; None: the head's own
    choice, counted as 1.2 GiB, since it takes more only if much is free. chunks: groups of layers on each pipeline rank
    (virtual pipeline). recompute: parts of a layer that backward computes again (`full` alone: all of it). offload:
    what moves to host memory while trajectories are sampled (`policy.offload`). local_layers: those without Transformer
    Engine, or it is not known (`policy.layer_spec: auto`). shared_prefixes: tokens with the same history are computed
    once.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    offload: str = "none"
    dtype: str = "bfloat16"
    recompute: tuple[str, ...] = ()
    streaming_head: bool = True
    micro_batch_tokens: int = 8192
    head_chunk_tokens: int | None = None
    local_layers: bool = False
    shared_prefixes: bool = False

    @classmethod
    def of(cls, policy: PolicyConfig, world_size: int) -> Split:
        """Return the split of a configuration on `world_size` ranks; rounded down where that is an error."""
        model_parallel = (
            policy.tensor_model_parallel_size * policy.pipeline_model_parallel_size * policy.context_parallel_size
        )
        recompute = {"none": (), "selective": policy.recompute_modules, "full": ("full",)}
        return cls(
            tensor=policy.tensor_model_parallel_size,
            pipeline=policy.pipeline_model_parallel_size,
            chunks=policy.virtual_pipeline_model_parallel_size or 1,
            context=policy.context_parallel_size,
            expert=policy.expert_model_parallel_size,
            data=max(1, world_size // model_parallel),
            sequence_parallel=policy.sequence_parallel,
            distributed_optimizer=policy.use_distributed_optimizer,
            offload=policy.offload,
            dtype=policy.dtype,
            recompute=recompute[policy.chosen.recompute],
            streaming_head=policy.head == "streaming",
            micro_batch_tokens=policy.chosen.micro_batch_tokens,
            head_chunk_tokens=policy.head_chunk_tokens,
            local_layers=policy.layer_spec != "transformer_engine",
            shared_prefixes=not against_shared_prefixes(policy),
        )

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def element(self) -> int:
        """Bytes of a weight and of an activation."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def optimizer_shards(self) -> int:
        """Ranks over which the optimizer state of a weight outside the experts is split."""
        return self.data * self.context if self.distributed_optimizer else 1

    @property
    def expert_optimizer_shards(self) -> int:
        """Ranks over which the optimizer state of an expert's weight is split: the ranks with the same experts."""
        return max(1, self.data * self.context // self.expert) if self.distributed_optimizer else 1


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank of pipeline stage `stage`. kept: by torch's allocator, of tensors that are freed."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    kept: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.head + self.kept

    def fits(self, gpu_gib: float = GPU_GIB) -> bool:
        """Return whether a GPU of that size can hold it."""
        return self.total <= USABLE * gpu_gib * GIB

    def while_sampling(self, offload: str) -> int:
        """Bytes that stay on the GPU while trajectories are sampled."""
        if offload == "none":
            return self.weights + self.gradients + self.optimizer
        return self.weights if offload == "optimizer" else 0


def model_parameters(spec: ModelSpec) -> tuple[int, int]:
    """(all parameters, parameters active for a token), as a model card counts them."""
    dense, experts = spec.family.layer_parameters(spec)
    active = experts * spec.num_experts_per_token // spec.num_experts if spec.num_experts else 0
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    rest = embeddings + spec.hidden_size
    return spec.num_layers * (dense + experts) + rest, spec.num_layers * (dense + active) + rest


def stage_parameters(spec: ModelSpec, split: Split, stage: int) -> tuple[int, int]:
    """(parameters outside experts, parameters of experts) on one rank of a pipeline stage."""
    dense, experts = spec.family.layer_parameters(spec, split.tensor, split.expert)
    layers = spec.num_layers // split.pipeline
    embedding = padded_vocabulary(spec.vocab_size, split.tensor) // split.tensor * spec.hidden_size
    first, last = stage == 0, stage == split.pipeline - 1
    extra = embedding if first else 0
    if last:
        # Tied embeddings are one tensor if the first and last stage are the same rank, else two copies.
        extra += spec.hidden_size + (0 if first and spec.tie_word_embeddings else embedding)
    return layers * dense + extra, layers * experts


def layer_activations(spec: ModelSpec, split: Split) -> dict[str, int]:
    """Bytes that one layer keeps for backward, per token of a micro-batch of one rank, by `recompute` module."""
    found = spec.family.layer_activations(spec, LayerSplit(split.tensor, split.element, split.sequence_parallel))
    heads = spec.num_attention_heads * spec.head_dim * split.element // split.tensor
    if split.local_layers:  # the output again, in order; with norms q, and v within q_k_v
        normed = heads + spec.num_key_value_heads * spec.head_dim * split.element // split.tensor if spec.qk_norm else 0
        found["attention"] += heads + normed
    elif split.shared_prefixes:  # the output once more, of rows; with norms v, too
        groups = spec.num_key_value_heads * spec.head_dim * split.element // split.tensor
        found["attention"] += heads + (groups if spec.qk_norm else 0)
    if split.dtype == "float32":  # no fused attention takes grouped keys in float32, so they are repeated
        repeated = 2 * (spec.num_attention_heads - spec.num_key_value_heads) * spec.head_dim
        found["attention"] += repeated * split.element // split.tensor
    return found


def repeated_token_share(spec: ModelSpec, split: Split) -> float:
    """Share of a row's activations that each further token of this row takes in Transformer Engine's attention.

    That keeps queries, keys, values and output of every token. Backward adds their gradients, and a float32 copy of the
    gradients of keys or values.
    """
    width, queries, groups = spec.head_dim * split.element, spec.num_attention_heads, spec.num_key_value_heads
    token = (2 * (queries + groups) * width + 4 * queries) // split.tensor
    kept, working = _kept_and_working({"attention": token}, split)
    working += 4 * groups * spec.head_dim // split.tensor
    row = _kept_and_working(layer_activations(spec, split), split)
    passes = [spec.num_layers // split.pipeline * in_flight(split, stage) for stage in range(split.pipeline)]
    return max((kept * count + working) / (row[0] * count + row[1]) for count in passes)


def in_flight(split: Split, stage: int) -> float:
    """Peak number of micro-batches whose activations stage `stage` holds, each counted with all layers of the rank.

    1F1B: pp - stage. Interleaved with v chunks per rank: (2 (pp - stage - 1) + (v - 1) pp + 1) chunks of 1 / v each. On
    the first stage this is 1F1B's pp times 1 + (pp - 1) / (pp v) (arXiv 2205.05198, section 4.2.3).
    """
    p, v = split.pipeline, split.chunks
    if v == 1:
        return p - stage
    return (2 * (p - stage - 1) + (v - 1) * p + 1) / v


def stage_memory(spec: ModelSpec, split: Split, stage: int) -> Memory:
    """Bytes of one rank of a pipeline stage, with at least as many micro-batches as stages."""
    dense, experts = stage_parameters(spec, split, stage)
    state = 8 + (0 if split.dtype == "float32" else 4)  # two moments, and the float32 copy of 16-bit weights
    optimizer = state * (dense // split.optimizer_shards + experts // split.expert_optimizer_shards)
    kept, working = _kept_and_working(layer_activations(spec, split), split)
    layers = spec.num_layers // split.pipeline
    activations = split.micro_batch_tokens * (kept * layers * in_flight(split, stage) + working)
    last = stage == split.pipeline - 1
    logits = KEPT_BLOCKS * _logits(spec, split) if last else 0
    return Memory(
        stage=stage,
        weights=split.element * (dense + experts),
        gradients=_MAIN_GRADIENT * (dense + experts),
        optimizer=optimizer,
        activations=int(activations),
        head=_head(spec, split) if last else 0,
        kept=int(logits + KEPT_SHARE * activations),
    )


def _kept_and_working(layer: Mapping[str, int], split: Split) -> tuple[int, int]:
    """Bytes of a token that a layer keeps for backward, and those that its backward adds.

    layer: as from `layer_activations`, or a part of it.
    """
    layer_bytes = sum(layer.values())
    if "full" in split.recompute:
        kept = layer.get("input", 0)
    else:
        # Flash attention recomputes its scores anyway: recomputing `core_attn` saves nothing.
        dropped = set(split.recompute) | ({"moe_act"} if "moe" in split.recompute else set())
        kept = sum(size for name, size in layer.items() if name not in dropped)
    # Backward of one layer: gradients of the size of its activations, and the recomputed activations.
    return kept, layer_bytes + (layer_bytes - kept)


def _head(spec: ModelSpec, split: Split) -> int:
    """Final norm, output layer and loss of one micro-batch."""
    n, p = split.micro_batch_tokens, split.element
    hidden = n * spec.hidden_size * p
    sharded = split.tensor if split.sequence_parallel else 1
    columns = _vocabulary_columns(spec, split)
    if not split.streaming_head:
        # Logits, the rows that predict a response token, and their float32 softmax; the gradient replaces the rows.
        return 2 * hidden // sharded + n * columns * (2 * p + 4)
    # Input and output of the norm; then, of all tokens: gathered hidden states if sharded, the rows used, their
    # gradient, and the scattered gradient.
    return 2 * hidden // sharded + (4 if sharded > 1 else 3) * hidden + _logits(spec, split)


def _logits(spec: ModelSpec, split: Split) -> int:
    """The largest tensor of the output layer: float32 logits of a chunk, or of the micro-batch."""
    columns, rows = _vocabulary_columns(spec, split), split.micro_batch_tokens
    if split.streaming_head:
        rows = min(rows, split.head_chunk_tokens or rows_within(DEFAULT_CHUNK, columns))
    return 4 * rows * columns


def _vocabulary_columns(spec: ModelSpec, split: Split) -> int:
    """Columns of one rank's shard."""
    return padded_vocabulary(spec.vocab_size, split.tensor) // split.tensor


def head_chunk_rows(spec: ModelSpec, split: Split, gpu_bytes: float) -> int:
    """Default number of rows whose logits the streaming head holds at a time, on GPUs of that size.

    Based on the memory that this plan leaves free, not on momentarily free memory. So every rank, the anchor pass,
    training and a resumed run use the same number, and get the same bits.
    """
    if split.head_chunk_tokens is not None:
        return split.head_chunk_tokens
    without_logits = stage_memory(spec, replace(split, head_chunk_tokens=1), split.pipeline - 1)
    return chunk_rows(_vocabulary_columns(spec, split), USABLE * gpu_bytes - without_logits.total)


def rows_within(size: int, columns: int) -> int:
    """Rows of float32 logits with `columns` columns that fit into `size` bytes (`ctpo_kernels.chunks.rows_within`)."""
    return max(_CHUNK_TILE, size // (4 * max(1, columns)) // _CHUNK_TILE * _CHUNK_TILE)


def chunk_rows(columns: int, free_bytes: float) -> int:
    """Rows of a chunk for a GPU with `free_bytes` of free memory (`ctpo_kernels.chunk_rows`)."""
    fitting = (size for size in _CHUNK_SIZES if size * _CHUNK_SHARE <= free_bytes)
    return rows_within(next(fitting, _CHUNK_SIZES[-1]), columns)


def peak_memory(spec: ModelSpec, split: Split) -> Memory:
    """Return the stage that needs the most memory."""
    stages = (stage_memory(spec, split, stage) for stage in range(split.pipeline))
    return max(stages, key=lambda memory: memory.total)


def memory_table(spec: ModelSpec, split: Split, gpu_gib: float = GPU_GIB) -> list[TableRow]:
    """Rows (what, size, how it follows) of the rank that needs most, on GPUs of that size."""
    most = peak_memory(spec, split)
    shards = split.optimizer_shards
    kept = "+".join(split.recompute) or "nothing"
    state = "float32 weights and two moments, 12 B" if split.dtype != "float32" else "two moments, 8 B"
    where = f"/ {shards}" if shards > 1 else "not split"
    where += f" (of experts / {split.expert_optimizer_shards})" if spec.num_experts and shards > 1 else ""
    head = "chunks of logits, hidden states and gradients" if split.streaming_head else "logits of the micro-batch"
    last = most.stage == split.pipeline - 1
    verdict = "" if most.fits(gpu_gib) else f"TOO MUCH for a GPU of {gpu_gib:g} GiB; "
    return [
        ("weights", gib(most.weights), f"{most.weights // split.element:,} parameters x {split.element} B"),
        ("gradients", gib(most.gradients), "x 4 B, float32"),
        ("optimizer", gib(most.optimizer), f"{state}, {where}"),
        (
            "activations",
            gib(most.activations),
            f"{split.micro_batch_tokens:,} tokens, {in_flight(split, most.stage):g} in flight, recomputed: {kept}",
        ),
        ("output layer and loss", gib(most.head), head if last else "on the last stage"),
        ("kept by the allocator", gib(most.kept), f"{KEPT_BLOCKS} blocks of logits, {KEPT_SHARE:.0%} of activations"),
        ("total", gib(most.total), f"{verdict}pipeline stage {most.stage}; CUDA context and NCCL not counted"),
        ("while sampling", gib(most.while_sampling(split.offload)), f"policy.offload: {split.offload}"),
    ]


def gib(size: float) -> str:
    """Bytes as GiB with one decimal (MiB below that)."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 or not size else f"{size / MIB:.1f} MiB"


def cache_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of the keys and values of one token on each GPU of an engine."""
    heads = max(1, spec.num_key_value_heads // config.rollout.engine.tensor_parallel_size)
    return 2 * spec.num_layers * heads * spec.head_dim * ELEMENT_BYTES[config.engine_dtype]


def free_memory() -> int:
    """Bytes that processes of this machine can still take; within a container, of its limit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # no Linux: a dry run for another machine
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit, used in _LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, free)


@dataclass(frozen=True)
class CpuCache:
    """The cache of one engine on a CPU.

    mb: its MiB. least_mb: MiB without which the engine does not start, for one longest sequence. most_mb: MiB that the
    machine has for it. sequences: that are sampled at once; tokens: of the longest; token_bytes: of each of these.
    """

    mb: int
    least_mb: int
    most_mb: int
    sequences: int
    tokens: int
    token_bytes: int

    @classmethod
    def of(cls, config: Config, spec: ModelSpec, free_bytes: int) -> Self:
        """As given, else for all that an engine samples at once, within its share of `free_bytes`."""
        rollout, engines = config.rollout, engine_count(config)
        batch = (rollout.prompts_per_step + rollout.oversample) * rollout.samples_per_prompt
        sequences = min(rollout.engine.max_num_seqs, -(-batch // engines))
        tokens, each = rollout.engine.max_model_len, cache_bytes(config, spec)
        here = max(1, engines // config.cluster.nodes)
        most = int(SHARE * free_bytes / here) // MIB
        wanted, least = (_mib(count, tokens, each) for count in (sequences, 1))
        mb = rollout.engine.kv_cache_mb or max(least, min(wanted, most))
        return cls(mb, least, most, sequences, tokens, each)

    def __str__(self) -> str:
        whole = f"{self.sequences} sequences x {self.tokens:,} tokens x {self.token_bytes:,} bytes"
        return f"{whole}, at most {self.most_mb:,} MiB"


def _mib(sequences: int, tokens: int, each: int) -> int:
    """MiB of whole blocks, and of the one that vLLM keeps for itself."""
    blocks = sequences * -(-tokens // _BLOCK) + 1
    return -(-blocks * _BLOCK * each // MIB)


def check_cache(config: Config, spec: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """vLLM refuses to start when its cache cannot hold one sequence of max_model_len."""
    engine, key = config.rollout.engine, "rollout.engine.kv_cache_mb"
    if spec is None:
        return
    if engine.kv_cache_mb is None:
        cache = CpuCache.of(config, spec, free_memory())
        if not job.cuda and cache.mb > cache.most_mb:
            message = f"one sequence of {cache.tokens:,} tokens needs {cache.mb:,} MiB; {SHARE:.0%} of the free memory"
            fix = "shorten rollout.engine.max_model_len, free memory, or give a size"
            yield error(config, key, f"{message} is {cache.most_mb:,} MiB an engine", fix)
        return
    per_token = cache_bytes(config, spec)
    needed = -(-per_token * engine.max_model_len // MIB)
    if engine.kv_cache_mb < needed:
        message = f"cannot hold one sequence of {engine.max_model_len} tokens ({per_token} bytes each)"
        yield error(config, key, message, f"set at least {needed}")
