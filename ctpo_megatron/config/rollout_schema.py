"""The configuration schema of sampling: engines, weight updates, placement, and the sandbox."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.reads import Reads, exists
from ctpo_megatron.config.section import Precision, Seconds, Section

StopText = Annotated[str, Field(min_length=1)]
COLDEST, HOTTEST = 0.01, 2.0
"""Sampling temperatures of vLLM 0.32: it raises lower ones to 0.01 with only a log line, and refuses higher ones."""


class EngineConfig(Section):
    """One vLLM engine. Memory and token limits are per engine."""

    max_model_len: PositiveInt = Field(default=2048, description="longest sequence in tokens, prompt included")
    max_num_seqs: PositiveInt = Field(default=128, description="sequences decoded at once")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field(
        default="auto", description="precision; auto: the trainer's (`policy.dtype`)"
    )
    tensor_parallel_size: PositiveInt = Field(default=1, description="GPUs of one engine")
    kv_cache_mb: PositiveInt | None = Field(
        default=None,
        description="KV cache size in MiB; null: on a CPU for what is sampled at once, within half of the free memory; "
        "on CUDA what `gpu_memory_utilization` leaves",
    )
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1, description="CUDA only")
    block_size: PositiveInt | None = Field(default=None, description="tokens of one KV block; null: vLLM's choice")
    enforce_eager: bool = Field(
        default=False, description="no compilation, no CUDA graphs: faster start, slower decode"
    )
    threads: PositiveInt = Field(default=1, description="CPU threads of the engine (CPU only)")
    model_runner: Literal["v1", "v2"] = Field(
        default="v1", description="vLLM's model runner: v1 is the tested one; v2, vLLM's own choice on GPUs, needs CUDA"
    )
    extra: Annotated[dict[str, Any], Reads(exists)] = Field(
        default_factory=dict, description="further vLLM engine arguments, passed as they are"
    )

    def precision(self, of_trainer: Precision) -> Precision:
        """Return the precision of the engine: `dtype`, or the trainer's where it is auto."""
        return of_trainer if self.dtype == "auto" else self.dtype


Transport = Literal["tcp", "nccl", "ipc"]


class WeightsConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["auto", Transport] = Field(
        default="auto",
        description="tcp: any nodes, this one included; nccl and (on shared GPUs) ipc: vLLM's own, for CUDA; auto: by "
        "placement and device",
    )
    timeout_s: Seconds = Field(
        default=300.0, description="deadline of one update for every engine; a late engine is replaced"
    )
    bucket_mib: PositiveInt = Field(
        default=16,
        description="tensors that are sent together, in MiB. A larger tensor is sent whole. With ipc the bucket is at "
        "least as large as the largest",
    )


class EndpointConfig(Section):
    """Agents of one's own (`rollout.environment: endpoint`): the model behind OpenAI's API, during rollouts."""

    agent: Extension | None = Field(
        default=None,
        description="`package.module:name`, a function or class of yours that runs an episode: it asks the model over "
        "HTTP until it has an answer",
    )
    timeout_s: Seconds = Field(
        default=600.0, description="deadline of one call of the agent; then its group is sampled again"
    )


class RolloutConfig(Section):
    """Sampling of trajectories: batch, sampling distribution, token and turn budgets, engines, deadlines."""

    prompts_per_step: PositiveInt = Field(default=32, description="prompts of one batch")
    samples_per_prompt: PositiveInt = Field(default=8, description="trajectories per prompt (one group)")
    temperature: float = Field(
        default=1.0, ge=COLDEST, le=HOTTEST, description="sampling temperature of training rollouts"
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="nucleus sampling; below 1 the trainer's log-probs are of another distribution",
    )
    top_k: int = Field(default=0, ge=0, description="0: no limit")
    stop: tuple[StopText, ...] = Field(
        default=(),
        max_length=16,
        description="texts that end a turn, as an end token does. The turn's text ends before it; its tokens stay, and "
        "are trained on",
    )
    max_turns: PositiveInt = Field(default=5, description="model turns; the last one can no longer call a tool")
    max_turn_tokens: PositiveInt | None = Field(
        default=None, description="model tokens per turn; null: only the budget below"
    )
    max_response_tokens: PositiveInt = Field(default=8000, description="tokens after the prompt, tool output included")
    max_tool_calls: PositiveInt | None = Field(
        default=None,
        description="tool calls per trajectory; a further one ends it (`tool_budget`), like a call in the last turn; "
        "null: only `max_turns`",
    )
    max_tool_s: Seconds | None = Field(
        default=None,
        description="execution seconds of a trajectory's tool calls, without queueing if the tool reports it; then as "
        "above. Slower tools end episodes earlier, so a run is not reproducible. null: no limit",
    )
    max_observation_chars: PositiveInt = Field(
        default=4096, description="longest tool output shown to the model; head and tail are kept"
    )
    tools: tuple[Extension, ...] = Field(
        default=(Extension(name="python"),),
        description="what the model can call: `python` (the sandbox), or `package.module:Name`",
    )
    tool_parser: Extension = Field(
        default=Extension(name="hermes"),
        description="how tools are called: `hermes` (arguments `parallel_calls`, default false, and `empty_output`, "
        "default `[no output]`), `fenced` (the first ```python block of a turn), or `package.module:Name`",
    )
    environment: Extension = Field(
        default=Extension(name="tools"),
        description="runs an episode: `tools` (the model calls tools until it answers), `endpoint` (an agent of yours "
        "asks the model over HTTP), or `package.module:Name`",
    )
    endpoint: EndpointConfig = EndpointConfig()
    uniform_groups: Literal["keep", "drop", "refill"] = Field(
        default="keep",
        description="groups whose rewards are all equal: train on them, drop them, or sample other groups instead",
    )
    max_refills: PositiveInt = Field(
        default=10, description="rounds of sampling to replace uniform groups, per step (refill only)"
    )
    oversample: NonNegativeInt = Field(
        default=0,
        description="extra prompts per batch; the slowest groups are discarded. Biased towards short responses and "
        "not reproducible",
    )
    filters: tuple[Extension, ...] = Field(
        default=(),
        description="what is masked in the loss, but counted in ratio and position: `void_turn`, `void_trajectory`, "
        "`truncated`, `failed_tool`, or `package.module:Name`",
    )
    max_staleness: NonNegativeInt = Field(
        default=0,
        description="maximum policy lag in updates; 0 = synchronous: sampling and training take turns",
    )
    lag: NonNegativeInt = Field(
        default=0,
        description="train step s on samples of the weights of step s - lag exactly, whatever the timing; a run begins "
        "with its first weights for lag + 1 steps. For experiments, instead of max_staleness",
    )
    partial: Literal["continue", "finish"] = Field(
        default="continue",
        description="trajectories in flight during an update (max_staleness > 0). continue: they switch to the new "
        "weights, recorded per token; finish: they complete on the old weights first, and the update waits",
    )
    engines: PositiveInt | Literal["auto"] = Field(
        default=1, description="vLLM engines of all nodes; auto: what `placement.engine_gpus` hold (CPU: one a node)"
    )
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    start_timeout_s: Seconds = Field(default=600.0, description="deadline for all engines to be ready")
    group_timeout_s: Seconds = Field(default=1800.0, description="deadline of one group of trajectories")
    max_group_retries: NonNegativeInt = Field(
        default=3,
        description="retries of a failed group; then its prompt is quarantined and replaced by another",
    )
    max_quarantined: NonNegativeInt = Field(
        default=16, description="prompts that may be quarantined after these retries; the run stops when one more fails"
    )
    replay: Annotated[str | None, Reads()] = Field(
        default=None,
        description="run directory whose recorded trajectories are trained on. No engine and no sandbox start, and "
        "nothing is evaluated, unless eval.every is above 0",
    )
    mismatch_limit: PositiveFloat | None = Field(
        default=None,
        description="stop when |sampler - trainer log-prob| exceeds this (a weight-sync bug); null: only log it",
    )

    @property
    def ahead(self) -> int:
        """Steps whose batches are sampled before they are trained."""
        return self.lag or self.max_staleness

    @property
    def can_call_tools(self) -> bool:
        """Whether a model turn may call a tool: there is one, and the turn is not the last."""
        return bool(self.tools) and self.max_turns > 1

    @property
    def needs_sandbox(self) -> bool:
        """Whether a tool runs programs in the sandbox."""
        return any(tool.name == "python" for tool in self.tools)


class ClusterConfig(Section):
    """The Ray cluster that RAY_ADDRESS names; without RAY_ADDRESS, Ray is private to this node."""

    nodes: PositiveInt = Field(
        default=1, description="nodes of the cluster, this one included; several need a token (SECURITY.md)"
    )
    node_address: str | None = Field(
        default=None, description="IP address of this node in the cluster; null: of the Ray node on this machine"
    )
    engine_placement: Literal["spread", "packed"] = Field(
        default="spread", description="engines on as many nodes as possible, or on as few as possible"
    )


class PlacementConfig(Section):
    """GPUs of the trainer and of the engines on one node, in the order in which CUDA shows them. Nothing on a CPU."""

    mode: Literal["disaggregated", "colocated"] = Field(
        default="disaggregated",
        description="engines have the GPUs after the trainer's, or share its GPUs and sleep while it works",
    )
    trainer_gpus: PositiveInt | None = Field(default=None, description="trainer ranks of a node; null: all there are")
    engine_gpus: PositiveInt | None = Field(
        default=None, description="GPUs of the engines of one node; null: what its share of rollout.engines needs"
    )


class SandboxConfig(Section):
    """The code_interpreter tool: our own server is started unless `url` names one."""

    url: str | None = Field(
        default=None, description="URL of a running server, or several separated by commas; null: start our own"
    )
    require: Literal["namespaces", "landlock", "none"] = Field(
        default="landlock", description="least isolation of our own server; it refuses to start with less"
    )
    slots: PositiveInt = Field(default=2, description="executions at once")
    run_timeout_s: Seconds = Field(
        default=4.0, description="CPU seconds of one execution; it ends after twice as many seconds in any case"
    )
    cpu_s: PositiveInt | None = Field(
        default=None,
        description="CPU seconds that the kernel ends an execution after; null: its time limit rounded up, plus 1",
    )
    memory_mb: int = Field(default=512, ge=32, description="address-space limit of one execution in MiB")
    address_space_mb: int | None = Field(
        default=None,
        ge=32,
        description="MiB that one execution may map; above memory_mb it needs a memory control group; null: memory_mb",
    )
    file_mb: PositiveInt = Field(
        default=8, description="size limit of each file of one execution in MiB, each of its outputs included"
    )
    open_files: int = Field(default=256, ge=4, description="file descriptors of one execution")
    disk_mb: PositiveInt = Field(default=64, description="size limit of all files of one execution together in MiB")
    disk_files: int = Field(default=4096, ge=2, description="number of files of one execution")
    threads: PositiveInt = Field(default=128, description="threads of one execution")
    output_kb: PositiveInt = Field(
        default=1000, description="thousands of bytes of each output that a reply carries; the rest is cut"
    )
    request_mb: PositiveInt = Field(default=16, description="size limit of one request in MiB")
    request_timeout_s: Seconds = Field(default=60.0, description="deadline of one tool call as the rollout sees it")
    max_concurrency: PositiveInt = Field(default=64, description="tool requests in flight, over the whole run")
    start_timeout_s: Seconds = Field(default=60.0, description="deadline for the server to answer")
    warm: str = Field(
        default="",
        description="modules that our own server preloads in addition to numpy and sympy, separated by commas",
    )
