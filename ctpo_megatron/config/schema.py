"""The configuration schema: every key, with its type, default, unit and meaning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
)

from ctpo_megatron.base.run_paths import EXPORT
from ctpo_megatron.config.data_schema import DataConfig
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.objective_schema import ObjectiveConfig
from ctpo_megatron.config.reads import Reads, at_home, input_paths
from ctpo_megatron.config.rollout_schema import HOTTEST, ClusterConfig, PlacementConfig, RolloutConfig, SandboxConfig
from ctpo_megatron.config.section import LARGEST_SEED, Precision, Seconds, Section
from ctpo_megatron.config.texts import is_template_file

_AUTO_INTERVAL_S, _AUTO_SHARE = 900.0, 0.05
"""Of `checkpoint.every: auto`: seconds between checkpoints, and the largest share of the time for writing them."""


_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML 1.1 takes `off` for false."""
Recompute = Literal["none", "selective", "full"]


class Chosen(NamedTuple):
    """Numbers of the policy that may be `auto`. gpu_gib: memory of the GPUs that they were chosen for, if they were."""

    micro_batch_tokens: int = 8192
    recompute: Recompute = "none"
    gpu_gib: float | None = None


class RunConfig(Section):
    """One training run and its directory, `<root>/<name>`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        description="directory name of the run: letters, digits, `.`, `_`, `-`; not of dots alone",
    )
    root: Annotated[str, AfterValidator(at_home)] = Field(default="runs", description="parent folder of all runs")
    seed: NonNegativeInt = Field(
        default=0, le=LARGEST_SEED, description="seeds prompt order, sampling and initialization"
    )
    steps: NonNegativeInt = Field(
        description="CTPO batches (rollout + update) in total, including those before a resume"
    )
    overwrite: bool = Field(default=False, description="delete an existing run directory of this name and start again")
    resume: bool | Literal["auto"] = Field(
        default=False,
        description="continue from the last complete checkpoint; auto: or start, where there is no run yet",
    )
    deadline: PositiveFloat | None = Field(
        default=None,
        description="end of this job in seconds since the epoch: the trainer saves and leaves in time; null: as Slurm "
        "says (SLURM_JOB_END_TIME), if there is one",
    )
    profile_steps: tuple[PositiveInt, ...] = Field(
        default=(),
        max_length=16,
        description="steps of which every rank and engine writes a trace of torch's profiler, for Perfetto "
        "(docs/monitoring.md)",
    )

    @property
    def directory(self) -> Path:
        return Path(self.root) / self.name


class ModelConfig(Section):
    """The model to train: a directory in Hugging Face format."""

    path: Annotated[str, Reads()] = Field(description="directory with config.json, weights and tokenizer")
    family: Extension | None = Field(
        default=None,
        description="your own model family, `package.module:Name` (docs/extending.md#model-family); null: one of ours",
    )
    chat_template: Annotated[str | None, Reads(is_template_file)] = Field(
        default=None,
        description="template for prompts, conversations and the export: `qwen3`, `qwen2.5` or a .jinja file "
        "(docs/rollout.md); null: the tokenizer's own",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="passed to the chat template, e.g. {enable_thinking: false}"
    )


class OptimizerConfig(Section):
    """AdamW (megatron-core) and its learning-rate schedule, counted in optimizer steps."""

    lr: PositiveFloat = Field(default=1e-6, description="peak learning rate")
    min_lr: NonNegativeFloat = Field(
        default=0.0, description="learning rate at the end of a linear, cosine or wsd schedule"
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant",
        description="wsd: constant, then linear down to min_lr over the last `decay_fraction` of the steps",
    )
    decay_fraction: float = Field(default=0.4, gt=0, le=1, description="share of the steps that decay (wsd only)")
    warmup_steps: NonNegativeInt = Field(
        default=0, description="optimizer steps of linear increase; the first has rate 0"
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW moments")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW denominator floor")
    weight_decay: NonNegativeFloat = Field(default=0.01, description="decoupled weight decay")
    weight_decay_of: Literal["matrices", "all"] = Field(
        default="matrices",
        description="parameters with weight decay: matrices and embeddings (Megatron's rule), or norms and biases too",
    )
    clip_grad: NonNegativeFloat = Field(default=1.0, description="global gradient-norm limit; 0 switches clipping off")


class SftConfig(Section):
    """Stage (b): supervised training on conversations (column `messages`), with the same optimizer step."""

    data: Annotated[tuple[str, ...], Reads()] = Field(
        min_length=1, description="files with a column `messages` (docs/data.md)"
    )
    steps: PositiveInt = Field(description="optimizer steps")
    conversations_per_step: PositiveInt = Field(
        default=32, description="conversations per optimizer step, over all ranks"
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-3)


class PolicyConfig(Section):
    """Megatron-Core policy: parallel layout, precision, optimizer. World size comes from torchrun."""

    tensor_model_parallel_size: PositiveInt = Field(default=1, description="ranks that share every layer")
    pipeline_model_parallel_size: PositiveInt = Field(default=1, description="ranks that share the stack of layers")
    virtual_pipeline_model_parallel_size: PositiveInt | None = Field(
        default=None, description="groups of layers on each pipeline rank, which interleave (smaller bubble); null: one"
    )
    context_parallel_size: PositiveInt = Field(default=1, description="ranks that share every sequence")
    expert_model_parallel_size: PositiveInt = Field(
        default=1, description="ranks that share the experts of a layer; taken from the data and context parallel ranks"
    )
    data_parallel_size: PositiveInt | None = Field(
        default=None, description="replicas; null: world size / (tensor x pipeline x context)"
    )
    sequence_parallel: bool = Field(
        default=False, description="split norms and residuals over the tensor-parallel ranks"
    )
    use_distributed_optimizer: bool = Field(
        default=False, description="split optimizer state over the data and context parallel ranks"
    )
    overlap_grad_reduce: bool = Field(default=False, description="reduce gradients while the backward pass still runs")
    overlap_param_gather: bool = Field(
        default=False,
        description="gather updated parameters while the next forward pass runs (distributed optimizer only)",
    )
    dtype: Precision = Field(
        default="float32", description="precision of the parameters; gradients are always reduced in float32"
    )
    initial_loss_scale: float = Field(
        default=2.0**16,
        ge=1,
        le=2.0**32,
        description="power of two that the loss is multiplied by at first, in the backward passes of `dtype: float16`; "
        "megatron-core lowers it when gradients overflow and raises it later (docs/policy.md)",
    )
    layer_spec: Literal["auto", "local", "transformer_engine"] = Field(
        default="auto", description="layer implementation; auto: Transformer Engine where it can train packed sequences"
    )
    head: Literal["streaming", "logits"] = Field(
        default="streaming",
        description="output layer and loss in one sweep over chunks of tokens, or logits of a whole micro-batch first",
    )
    head_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="rows whose logits `head: streaming` holds at a time; results round by it. null: by the GPU's size",
    )
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        default="auto",
        description="recompute in backward to save memory: every layer, or `recompute_modules`; auto: on CUDA by "
        "the memory plan (docs/parallelism.md), else none",
    )
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "layernorm", "moe_act"], ...] = Field(
        default=("core_attn",), min_length=1, description="parts of a layer that `recompute: selective` computes again"
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none",
        description="what leaves the GPU while trajectories are sampled; all: the parameters too (CUDA only)",
    )
    share_prefixes: Annotated[Literal["auto", "off"], _OFF] = Field(
        default="auto",
        description="auto: tokens of a micro-batch with the same history are computed once, without context "
        "parallelism and router replay; off: every token of every sequence is computed",
    )
    router_replay: bool = Field(
        default=False,
        description="experts: the trainer uses those that the engine used for each token (docs/parallelism.md)",
    )
    pad_to_multiple: PositiveInt = Field(
        default=1, description="pad every sequence to a multiple of this many tokens (FP8 layers need 16)"
    )
    mini_batch_prompts: PositiveInt = Field(
        default=4, description="prompts (groups) per optimizer step, over all ranks"
    )
    passes_per_batch: PositiveInt = Field(
        default=1,
        description="how often a batch is trained on; later passes draw an order of its mini-batches; old log-probs "
        "stay those before the first update (docs/policy.md)",
    )
    micro_batch_tokens: PositiveInt | Literal["auto"] = Field(
        default="auto",
        description="most tokens packed into one forward pass, on one context-parallel rank; auto: on CUDA by the "
        "memory plan (docs/parallelism.md), else 8192",
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="trajectories whose advantage is 0 stay out of the passes, not out of the denominators. Without "
        "effect where that would change the gradient: objective.function, objective.entropy_coef, and an "
        "objective.correction that rejects or normalizes",
    )
    max_bad_steps: PositiveInt = Field(
        default=3,
        description="optimizer steps in a row without a finite loss and gradient norm that end the run; fewer are "
        "skipped and counted",
    )
    threads: PositiveInt = Field(
        default=1, description="CPU threads of each trainer rank; fewer where the node has not a core for each"
    )
    timeout_minutes: PositiveFloat = Field(
        default=30.0, le=1e7, description="deadline of every collective, and of a rank that rank 0 waits for"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    _auto: Chosen = PrivateAttr(default=Chosen())

    @property
    def chosen(self) -> Chosen:
        """`micro_batch_tokens` and `recompute` as given, or what `auto` is: without `with_auto` as on a CPU."""
        tokens, recompute, gpu_gib = self._auto
        return Chosen(
            tokens if self.micro_batch_tokens == "auto" else self.micro_batch_tokens,
            recompute if self.recompute == "auto" else self.recompute,
            gpu_gib,
        )

    def with_auto(self, chosen: Chosen) -> Self:
        """Return a copy in which `auto` is this. It is not part of the value: a dump keeps `auto`."""
        copy = self.model_copy()
        copy._auto = chosen
        return copy


class OverlongPenaltyConfig(Section):
    """DAPO's soft overlong punishment: a penalty for responses that come close to their budget."""

    buffer: PositiveInt = Field(
        description="tokens before `rollout.max_response_tokens` over which the penalty grows from 0"
    )
    penalty: PositiveFloat = Field(default=1.0, description="penalty of a response that uses the whole budget")


class RewardConfig(Section):
    """Scoring of trajectories by reward functions, in worker processes."""

    function: Extension = Field(
        default=Extension(name="math_verify"),
        description="reward function: math_verify (argument box_in_thinking: whether a box in thinking that has ended "
        "counts, default true) or package.module:Name",
    )
    by_source: dict[str, Extension] = Field(
        default_factory=dict, description="data_source -> reward function, where another one scores its prompts"
    )
    workers: PositiveInt = Field(default=1, description="worker processes")
    concurrency: PositiveInt = Field(
        default=64, description="trajectories that one worker awaits at once, if the reward function is async"
    )
    timeout_s: Seconds = Field(
        default=5.0, description="hard limit per trajectory; a reward function that exceeds it is killed"
    )
    max_failed: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="largest share of samples without a verdict, as a mean over three batches; above it the run saves "
        "its state and ends. Below 1 it also ends after the first step if that has no verdict at all",
    )
    overlong_penalty: OverlongPenaltyConfig | None = Field(
        default=None, description="subtracted from the rewards of long responses in training; null: nothing"
    )


class EvalConfig(Section):
    """Evaluation on `data.eval` before the first step, every `every` steps (0: never between), and at the end."""

    before_training: bool = Field(default=True, description="evaluate before the first step")
    every: NonNegativeInt = Field(
        default=0, description="steps between evaluations; 0: none between the first step and the last"
    )
    prompts: PositiveInt | None = Field(default=None, description="evaluate only the first N prompts; null: all")
    samples: PositiveInt = Field(default=1, description="trajectories per prompt")
    temperature: NonNegativeFloat = Field(default=0.0, le=HOTTEST, description="0: greedy; else at least 0.01")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus filter")

    def due(self, done: int, steps: int) -> bool:
        """Return whether an evaluation is due after `done` of `steps` steps."""
        if done in (0, steps):
            return done == steps or self.before_training
        return self.every > 0 and done % self.every == 0


class ExtensionsConfig(Section):
    """Users' own parts, named `package.module:Name` elsewhere in the configuration."""

    path: Annotated[tuple[str, ...] | None, Reads()] = Field(
        default=None, description="folders that they are imported from; null: the folder of the configuration file"
    )


def auto_interval_s(write_s: float) -> float:
    """Seconds between the checkpoints of `checkpoint.every: auto`, where writing one takes `write_s` seconds."""
    return max(_AUTO_INTERVAL_S, write_s / _AUTO_SHARE)


class CheckpointConfig(Section):
    """Megatron distributed checkpoints under `<run>/checkpoints/step_%06d`."""

    every: NonNegativeInt | Literal["auto"] = Field(
        default="auto",
        description="RL steps between checkpoints; auto: one every 15 minutes, rarer where writing would take more "
        "than 5 % of the time; 0: none in between. There is always one after the last step",
    )
    keep_last: PositiveInt = Field(default=2, description="newest checkpoints that are kept")
    keep_best: NonNegativeInt = Field(default=0, description="additional checkpoints kept, ranked by `best_metric`")
    best_metric: str = Field(
        default="reward/mean",
        description="metric of that step, larger is better, e.g. `val/<data_source>/acc/mean@1`",
    )
    asynchronous: bool = Field(
        default=False, description="write in a forked process while training continues; complete at a later step"
    )
    sft_every: NonNegativeInt = Field(
        default=0, description="SFT steps between checkpoints; 0: only when the run is stopped"
    )
    load: Annotated[str | None, Reads()] = Field(
        default=None,
        description="checkpoint directory to continue from: with run.resume: true instead of the newest; with auto, if "
        "it is of another run, only while this run has none; null: none",
    )
    grace_s: Seconds = Field(
        default=120.0,
        description="seconds to finish the current step and write a checkpoint after SIGTERM, SIGUSR1, SIGHUP or "
        "Ctrl-C, and before the job's end",
    )

    def due(self, done: int, steps: int, *, since_s: float, write_s: float) -> bool:
        """Return whether a checkpoint is due after `done` of `steps` steps.

        since_s: seconds since the last one was begun, or the run. write_s: seconds that writing one takes; 0: unknown.
        """
        if done == steps > 0:
            return True
        if self.every == "auto":
            return since_s >= auto_interval_s(write_s)
        return self.every > 0 and done % self.every == 0


class ExportConfig(Section):
    """Stage (e): the final policy in Hugging Face format under `<run>/<directory>`."""

    enabled: bool = Field(default=True, description="export at the end of the run")
    directory: str = Field(
        default=EXPORT,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="folder name inside the run directory; a model directory of that name is replaced",
    )


class TrackingConfig(Section):
    """Outputs in addition to `metrics.jsonl`, which every run has."""

    live: Annotated[Literal["auto", "plain", "off"], _OFF] = Field(
        default="auto", description="auto: live display on a terminal, else plain"
    )
    trackers: tuple[Extension, ...] = Field(
        default=(Extension(name="tensorboard"),),
        description="in addition to metrics.jsonl: tensorboard, wandb, mlflow, prometheus, or `package.module:Name`",
    )
    timeout_s: Seconds = Field(
        default=60.0,
        description="deadline of one call to a tracker, and of all trackers at the end; one that exceeds it is "
        "switched off",
    )
    trajectories: Literal["all", "sample", "none"] = Field(
        default="all", description="which trajectories of a step are written; sample: of 8 prompts"
    )
    dump_every: PositiveInt = Field(
        default=10,
        description="N: every N steps, and at the first and the last, dumps have the ratios of all mini-batches, "
        "else of the last. Then positions.jsonl has lines for the first and the last, too, and a pass without gradient "
        "gives the ratios of their trajectories of advantage 0",
    )
    report: bool = Field(default=True, description="write report.html and figures at the end")
    peak_flops: PositiveFloat | None = Field(
        default=None,
        description="peak FLOP/s of one device that MFU refers to; null: by the GPU's name, no MFU if unknown",
    )


class Config(Section):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    sft: SftConfig | None = None
    objective: ObjectiveConfig = ObjectiveConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    placement: PlacementConfig = PlacementConfig()
    cluster: ClusterConfig = ClusterConfig()
    sandbox: SandboxConfig = SandboxConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    extensions: ExtensionsConfig = ExtensionsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    tracking: TrackingConfig = TrackingConfig()
    _files: tuple[Path, ...] = PrivateAttr(default=())

    def read_from(self, files: Iterable[Path]) -> Self:
        """Return the same configuration with a record of its YAML files, which is not part of its value."""
        self._files = tuple(files)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    def inputs(self) -> Iterator[tuple[str, Path]]:
        """Key and path of every input of this run (`Reads` in the schema), and of its own YAML files."""
        yield from input_paths(self)
        yield from (("configuration", file) for file in self._files)

    @property
    def engine_dtype(self) -> Precision:
        """Precision of the engines: `rollout.engine.dtype`, the trainer's where it is auto."""
        return self.rollout.engine.precision(self.policy.dtype)
