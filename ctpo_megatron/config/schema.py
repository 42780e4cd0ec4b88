"""The configuration schema: every key a run understands, with its type, default, unit and meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunConfig(Section):
    """One training run and its directory, `<root>/<name>`."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    root: str = "runs"
    seed: NonNegativeInt = 0
    steps: NonNegativeInt = Field(description="CTPO batches (rollout + update) to run in all, resumed ones included")
    overwrite: bool = Field(False, description="delete an existing run directory of this name and start anew")
    resume: bool = Field(False, description="continue from the last complete checkpoint of this run")

    @property
    def directory(self) -> Path:
        return Path(self.root) / self.name


class TinyModelConfig(Section):
    """Shape of the model that `prepare` builds (Qwen3, randomly initialized)."""

    hidden_size: PositiveInt = 96
    num_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: PositiveInt = 24
    intermediate_size: PositiveInt = 256
    max_position_embeddings: PositiveInt = 512
    tie_word_embeddings: bool = True
    rope_theta: PositiveFloat = 1e4
    initializer_range: PositiveFloat = 0.06
    vocab_padding_multiple: PositiveInt = 128


class CorruptionConfig(Section):
    """How often a warm-up trace is spoiled; each spoiling is drawn independently."""

    guess: float = Field(0.15, ge=0, le=1, description="answers at once with a random number, no tool call")
    wrong_common: float = Field(0.50, ge=0, le=1, description="calls the tool with the family's usual wrong program")
    wrong_rare: float = Field(0.08, ge=0, le=1, description="calls the tool with a rarer wrong program")
    no_print: float = Field(0.06, ge=0, le=1, description="forgets print(), so the observation is empty")
    no_box: float = Field(0.12, ge=0, le=1, description="answers without \\boxed{}")


class PrepareConfig(Section):
    """Stage (a): build the synthetic tool-arithmetic task, its tokenizer and a tiny model. Absent for real models."""

    kind: Literal["toolmath"] = "toolmath"
    directory: str = Field(description="receives model/, train.parquet, heldout.parquet, warmup.parquet")
    seed: NonNegativeInt = 0
    train_prompts: PositiveInt = 4096
    heldout_prompts: PositiveInt = 256
    warmup_traces: PositiveInt = 16384
    tokenizer_traces: PositiveInt = 4000
    corruption: CorruptionConfig = CorruptionConfig()
    model: TinyModelConfig = TinyModelConfig()


class ModelConfig(Section):
    """The model to train: a directory in Hugging Face format."""

    path: str
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="passed to the chat template, e.g. {enable_thinking: false}"
    )


class DataConfig(Section):
    """Prompt files: parquet in the schema of docs/data.md (`data_source`, `prompt`, `reward_model`, ...)."""

    train: tuple[str, ...] = Field(min_length=1)
    eval: tuple[str, ...] = ()
    max_prompt_tokens: PositiveInt = 1024
    shuffle: bool = True
    tool_in_prompt: bool = Field(
        True, description="offer the code_interpreter schema to the chat template (false: the prompt alone)"
    )


class OptimizerConfig(Section):
    """AdamW (megatron-core) and its learning-rate schedule, counted in optimizer steps."""

    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: NonNegativeFloat = Field(1.0, description="global gradient-norm limit; 0 switches clipping off")


class WarmupConfig(Section):
    """Stage (b): supervised warm-up on conversations (parquet column `messages`), through the same policy step."""

    data: tuple[str, ...] = Field(min_length=1)
    steps: PositiveInt
    traces_per_step: PositiveInt = 32
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3)


class AdvantageConfig(Section):
    """Outcome reward -> advantage, over the samples of one prompt (algorithm section 5)."""

    kind: Literal["group", "rloo", "mean_baseline"] = "group"
    normalize_std: bool = Field(True, description="divide by the group's unbiased standard deviation (group only)")


class ObjectiveConfig(Section):
    """The policy loss: a preset, and any field of it overridden (null keeps the preset's value)."""

    preset: Literal["ctpo", "ctpo-fixed", "ctpo-geomean", "grpo", "dapo", "gspo", "sequence"] = "ctpo"
    anchor: Literal["proximal", "behaviour"] = "proximal"
    advantage: AdvantageConfig = AdvantageConfig()
    ratio: Literal["cumulative", "geomean", "token", "sequence", "sequence_geomean"] | None = None
    clip: Literal["log_power", "ratio"] | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    clip_dual: float | None = Field(None, description="dual-clip bound; a negative number switches it off")
    clip_power: float | None = None
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum"] | None = None
    count_masked_sequences: bool | None = None


class PolicyConfig(Section):
    """Megatron-Core policy: parallel layout, precision, optimizer. World size comes from torchrun."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    recompute: Literal["none", "full"] = "none"
    mini_batch_prompts: PositiveInt = Field(4, description="prompts (groups) per optimizer step, over all ranks")
    micro_batch_tokens: PositiveInt = Field(8192, description="most tokens packed into one forward pass on one rank")
    threads: PositiveInt = Field(1, description="CPU threads of each trainer rank")
    timeout_minutes: PositiveFloat = Field(30.0, description="deadline of every collective operation")
    optimizer: OptimizerConfig = OptimizerConfig()


class EngineConfig(Section):
    """One vLLM engine. Memory and token limits are per engine."""

    max_model_len: PositiveInt = 2048
    max_num_seqs: PositiveInt = 128
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    tensor_parallel_size: PositiveInt = 1
    kv_cache_mb: PositiveInt | None = Field(None, description="KV cache size in MiB; required on CPU")
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1, description="CUDA only")
    block_size: PositiveInt | None = None
    enforce_eager: bool = False
    threads: PositiveInt = Field(1, description="CPU threads of the engine (CPU only)")
    extra: dict[str, Any] = Field(default_factory=dict, description="further vLLM engine arguments, passed as they are")


class RolloutConfig(Section):
    """Sampling of trajectories: batch, sampling distribution, token and turn budgets, fleet, deadlines."""

    prompts_per_step: PositiveInt = 32
    samples_per_prompt: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: no limit")
    max_turns: PositiveInt = Field(5, description="model turns; the last one may not call the tool any more")
    max_turn_tokens: PositiveInt | None = Field(None, description="model tokens per turn; null: only the budget below")
    max_response_tokens: PositiveInt = Field(8000, description="tokens after the prompt, tool output included")
    max_observation_chars: PositiveInt = 4096
    engines: PositiveInt = 1
    engine: EngineConfig = EngineConfig()
    start_timeout_s: PositiveFloat = 600.0
    group_timeout_s: PositiveFloat = Field(1800.0, description="deadline of one group of trajectories")
    max_group_retries: NonNegativeInt = 3
    mismatch_limit: PositiveFloat | None = Field(
        None, description="stop when |sampler - trainer log-prob| exceeds this (a weight-sync bug); null: only log it"
    )


class SandboxConfig(Section):
    """The code_interpreter tool: our own server is started unless `url` names one."""

    url: str | None = None
    slots: PositiveInt = Field(2, description="executions at once")
    run_timeout_s: PositiveFloat = 4.0
    memory_mb: PositiveInt = 512
    request_timeout_s: PositiveFloat = Field(60.0, description="deadline of one tool call as the rollout sees it")
    max_concurrency: PositiveInt = Field(64, description="tool requests in flight, over the whole run")
    start_timeout_s: PositiveFloat = 60.0


class RewardConfig(Section):
    """Answer scoring in worker processes."""

    kind: Literal["math_verify"] = "math_verify"
    workers: PositiveInt = 1
    timeout_s: PositiveFloat = Field(5.0, description="hard limit per trajectory; a scorer that exceeds it is killed")


class EvalConfig(Section):
    """Evaluation on `data.eval` before the first step, every `every` steps (0: never between), and at the end."""

    every: NonNegativeInt = 0
    prompts: PositiveInt | None = Field(None, description="use only the first so many; null: all")
    samples: PositiveInt = 1
    temperature: NonNegativeFloat = Field(0.0, description="0: greedy")


class CheckpointConfig(Section):
    """Megatron distributed checkpoints under `<run>/checkpoints/step_%06d`."""

    every: NonNegativeInt = Field(0, description="RL steps between checkpoints; 0: none")
    keep_last: PositiveInt = 2


class ExportConfig(Section):
    """Stage (e): the final policy in Hugging Face format under `<run>/<directory>`."""

    enabled: bool = True
    directory: str = "model"


class ObserveConfig(Section):
    """What is written beside `metrics.jsonl`."""

    live: Literal["auto", "plain", "off"] = Field("auto", description="auto: live display on a terminal, else plain")
    tensorboard: bool = True
    trajectories: bool = Field(True, description="write every trajectory of every step")
    report: bool = True


class Config(Section):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    prepare: PrepareConfig | None = None
    warmup: WarmupConfig | None = None
    objective: ObjectiveConfig = ObjectiveConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = SandboxConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    observe: ObserveConfig = ObserveConfig()
