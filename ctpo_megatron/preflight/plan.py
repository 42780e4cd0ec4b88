"""The layout, the batch arithmetic and the memory that follow from a configuration, as tables for `--dry-run`."""

from __future__ import annotations

from ctpo_megatron.config import GPU_GIB, KEPT_BLOCKS, KEPT_SHARE, Config, Split, evaluates, gib, in_flight, peak_memory
from ctpo_megatron.models import ModelSpec

TableRow = tuple[str, str, str]
"""Quantity, value, how it follows from the configuration."""


def evaluations(config: Config) -> int:
    """Evaluations of a whole run."""
    if not evaluates(config):
        return 0
    steps = config.run.steps
    return sum(config.eval.due(done, steps) for done in range(steps + 1))


def plan_tables(config: Config, world_size: int) -> dict[str, list[TableRow]]:
    """Title -> rows of the tables of a run on `world_size` ranks, rounded down where `validate` reports an error.

    "Sequences" are trajectories; token numbers are upper bounds, not forecasts.
    """
    policy, rollout, steps = config.policy, config.rollout, config.run.steps
    split = Split.of(policy, world_size)
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    mini_batches = max(1, prompts // policy.mini_batch_prompts)
    passes = policy.passes_per_batch
    sequences = prompts * samples
    in_mini_batch = sequences // mini_batches
    repeated = f" x {passes} passes" if passes > 1 else ""
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    sft_steps = config.sft.steps if config.sft else 0
    parallel = [
        ("world size", f"{world_size}", "ranks that torchrun starts (WORLD_SIZE)"),
        ("tensor parallel", f"{split.tensor}", "policy.tensor_model_parallel_size"),
        ("pipeline parallel", f"{split.pipeline}", "policy.pipeline_model_parallel_size"),
        ("  chunks of layers a rank", f"{split.chunks}", "policy.virtual_pipeline_model_parallel_size"),
        ("context parallel", f"{split.context}", "policy.context_parallel_size"),
        ("data parallel", f"{split.data}", "world size / (tensor x pipeline x context)"),
        ("expert parallel", f"{split.expert}", "policy.expert_model_parallel_size, of data x context"),
    ]
    batch = [
        ("sequences per batch", f"{sequences:,}", f"{prompts} prompts x {samples} samples"),
        ("mini-batches per batch", f"{mini_batches}", "prompts_per_step / mini_batch_prompts"),
        ("sequences per mini-batch", f"{in_mini_batch:,}", "one optimizer step, over all ranks"),
        ("  on one data-parallel rank", f"{in_mini_batch // split.data:,}", f"/ {split.data}"),
        ("optimizer steps", f"{steps * mini_batches * passes:,}", f"{steps} batches x {mini_batches}{repeated}"),
        ("sft steps", f"{sft_steps:,}", "supervised, before the first batch"),
        ("evaluations", f"{evaluations(config)}", "eval.before_training, every eval.every, at the end"),
    ]
    tokens = [
        ("one sequence", f"{longest:,}", "data.max_prompt_tokens + rollout.max_response_tokens"),
        ("one batch", f"{sequences * longest:,}", "if every sequence is that long"),
        ("whole run", f"{sequences * longest * steps:,}", f"{steps} batches"),
    ]
    return {"Parallel layout": parallel, "Batch arithmetic": batch, "Tokens at most": tokens}


def memory_table(spec: ModelSpec, split: Split, gpu_gib: float = GPU_GIB) -> list[TableRow]:
    """Rows (what, size, how it follows) of the rank that needs most, on GPUs of that size."""
    most = peak_memory(spec, split)
    weights, gradients = most.weights, most.gradients
    shards = split.optimizer_shards
    kept = "+".join(split.recompute) or "nothing"
    state = "float32 weights and two moments, 12 B" if split.dtype != "float32" else "two moments, 8 B"
    where = f"/ {shards}" if shards > 1 else "not split"
    where += f" (of experts / {split.expert_optimizer_shards})" if spec.num_experts and shards > 1 else ""
    head = "chunks of logits, hidden states and gradients" if split.streaming_head else "logits of the micro-batch"
    last = most.stage == split.pipeline - 1
    verdict = "" if most.fits(gpu_gib) else f"TOO MUCH for a GPU of {gpu_gib:g} GiB; "
    return [
        ("weights", gib(weights), f"{weights // split.element:,} parameters x {split.element} B"),
        ("gradients", gib(gradients), "x 4 B, float32"),
        ("optimizer", gib(most.optimizer), f"{state}, {where}"),
        (
            "activations",
            gib(most.activations),
            f"{split.micro_batch_tokens:,} tokens, {in_flight(split, most.stage):g} in flight, recomputed: {kept}",
        ),
        ("output layer and loss", gib(most.head), head if last else "on the last stage"),
        ("kept by the allocator", gib(most.kept), f"{KEPT_BLOCKS} blocks of logits, {KEPT_SHARE:.0%} of activations"),
        (
            "total",
            gib(most.total),
            f"{verdict}pipeline stage {most.stage}; CUDA context and NCCL not counted",
        ),
        ("while sampling", gib(most.while_sampling(split.offload)), f"policy.offload: {split.offload}"),
    ]
