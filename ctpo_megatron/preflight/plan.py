"""The layout, the batch arithmetic and the memory that follow from a configuration, as tables for `--dry-run`."""

from __future__ import annotations

from dataclasses import dataclass

from ctpo_megatron.config import GPU_GIB, Config, Split, gib, in_flight, peak_memory
from ctpo_megatron.models import ModelSpec

TableRow = tuple[str, str, str]
"""Quantity, value, how it follows from the configuration."""


@dataclass(frozen=True)
class RunPlan:
    """Counts of one run. "Sequences" are trajectories; token numbers are upper bounds, not forecasts."""

    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    virtual_pipeline: int
    context_parallel: int
    expert_parallel: int
    data_parallel: int
    prompts_per_batch: int
    samples_per_prompt: int
    mini_batches: int
    steps: int
    max_prompt_tokens: int
    max_response_tokens: int
    sft_steps: int
    evaluations: int

    @classmethod
    def of(cls, config: Config, world_size: int) -> RunPlan:
        """The plan on `world_size` ranks. Numbers are rounded down where `check` would report an error."""
        policy, rollout = config.policy, config.rollout
        tp, pp, cp = (
            policy.tensor_model_parallel_size,
            policy.pipeline_model_parallel_size,
            policy.context_parallel_size,
        )
        steps = config.run.steps
        evaluations = sum(config.eval.due(done, steps) for done in range(steps + 1)) if config.data.eval else 0
        return cls(
            world_size=world_size,
            tensor_parallel=tp,
            pipeline_parallel=pp,
            virtual_pipeline=policy.virtual_pipeline_model_parallel_size or 1,
            context_parallel=cp,
            expert_parallel=policy.expert_model_parallel_size,
            data_parallel=max(1, world_size // (tp * pp * cp)),
            prompts_per_batch=rollout.prompts_per_step,
            samples_per_prompt=rollout.samples_per_prompt,
            mini_batches=max(1, rollout.prompts_per_step // policy.mini_batch_prompts),
            steps=steps,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            sft_steps=config.own_sft.steps if config.own_sft else 0,
            evaluations=evaluations,
        )

    @property
    def sequences_per_batch(self) -> int:
        return self.prompts_per_batch * self.samples_per_prompt

    @property
    def sequences_per_mini_batch(self) -> int:
        return self.sequences_per_batch // self.mini_batches

    @property
    def sequences_per_rank(self) -> int:
        """Sequences of one mini-batch on one data-parallel rank."""
        return self.sequences_per_mini_batch // self.data_parallel

    @property
    def optimizer_steps(self) -> int:
        """Reinforcement-learning updates of the whole run, the supervised stage not counted."""
        return self.steps * self.mini_batches

    @property
    def max_sequence_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def max_batch_tokens(self) -> int:
        return self.sequences_per_batch * self.max_sequence_tokens

    def tables(self) -> dict[str, list[TableRow]]:
        """Title -> rows, ready to print."""
        n = self.samples_per_prompt
        parallel = [
            ("world size", f"{self.world_size}", "ranks that torchrun starts (WORLD_SIZE)"),
            ("tensor parallel", f"{self.tensor_parallel}", "policy.tensor_model_parallel_size"),
            ("pipeline parallel", f"{self.pipeline_parallel}", "policy.pipeline_model_parallel_size"),
            ("  chunks of layers a rank", f"{self.virtual_pipeline}", "policy.virtual_pipeline_model_parallel_size"),
            ("context parallel", f"{self.context_parallel}", "policy.context_parallel_size"),
            ("data parallel", f"{self.data_parallel}", "world size / (tensor x pipeline x context)"),
            ("expert parallel", f"{self.expert_parallel}", "policy.expert_model_parallel_size, of data x context"),
        ]
        batch = [
            ("sequences per batch", f"{self.sequences_per_batch:,}", f"{self.prompts_per_batch} prompts x {n} samples"),
            ("mini-batches per batch", f"{self.mini_batches}", "prompts_per_step / mini_batch_prompts"),
            ("sequences per mini-batch", f"{self.sequences_per_mini_batch:,}", "one optimizer step, over all ranks"),
            ("  on one data-parallel rank", f"{self.sequences_per_rank:,}", f"/ {self.data_parallel}"),
            ("optimizer steps", f"{self.optimizer_steps:,}", f"{self.steps} batches x {self.mini_batches}"),
            ("sft steps", f"{self.sft_steps:,}", "supervised, before the first batch"),
            ("evaluations", f"{self.evaluations}", "eval.before_training, every eval.every, at the end"),
        ]
        tokens = [
            ("one sequence", f"{self.max_sequence_tokens:,}", "data.max_prompt_tokens + rollout.max_response_tokens"),
            ("one batch", f"{self.max_batch_tokens:,}", "if every sequence is that long"),
            ("whole run", f"{self.max_batch_tokens * self.steps:,}", f"{self.steps} batches"),
        ]
        return {"Parallel layout": parallel, "Batch arithmetic": batch, "Tokens at most": tokens}


def memory_table(spec: ModelSpec, split: Split) -> list[tuple[str, str, str]]:
    """Rows (what, size, how it follows) of the rank that needs most."""
    most = peak_memory(spec, split)
    weights, gradients = most.weights, most.gradients
    shards = split.optimizer_shards
    kept = "+".join(split.recompute) or "nothing"
    state = "float32 weights and two moments, 12 B" if split.dtype != "float32" else "two moments, 8 B"
    where = f"/ {shards}" if shards > 1 else "not split"
    where += f" (of experts / {split.expert_optimizer_shards})" if spec.num_experts and shards > 1 else ""
    head = "chunks of logits, hidden states and gradients" if split.streaming_head else "logits of the micro-batch"
    last = most.stage == split.pipeline - 1
    verdict = "" if most.fits else f"TOO MUCH for a GPU of {GPU_GIB} GiB; "
    unknown = "" if spec.vocab_size else ", without the vocabulary that `prepare` will decide"
    return [
        ("weights", gib(weights), f"{weights // split.element:,} parameters x {split.element} B{unknown}"),
        ("gradients", gib(gradients), "x 4 B, float32"),
        ("optimizer", gib(most.optimizer), f"{state}, {where}"),
        (
            "activations",
            gib(most.activations),
            f"{split.micro_batch_tokens:,} tokens, {in_flight(split, most.stage):g} in flight, recomputed: {kept}",
        ),
        ("output layer and loss", gib(most.head), head if last else "on the last stage"),
        (
            "total",
            gib(most.total),
            f"{verdict}pipeline stage {most.stage}; context, NCCL and fragmentation not counted",
        ),
        ("while sampling", gib(most.while_sampling(split.offload)), f"policy.offload: {split.offload}"),
    ]
