"""Memory of a run on the host of a node: what its processes hold without a model, measured, and what the model adds."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ctpo_megatron.config import (
    ELEMENT_BYTES,
    Config,
    CpuCache,
    Job,
    Split,
    engine_count,
    free_memory,
    gib,
    model_parameters,
    needs_engines,
    peak_memory,
    shares_gpus,
)
from ctpo_megatron.environments import needs_sandbox
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.plan import TableRow

MIB = 1 << 20
TRAINER, ENGINE, RAY, SANDBOX, SCORER = 680 * MIB, 850 * MIB, 250 * MIB, 65 * MIB, 50 * MIB
"""What processes hold without a model: proportional set sizes of the quickstart, less what the model adds.

Measured on two cores with torch 2.13, vLLM 0.32 and Ray 2.60. The whole run held 2.11 GiB; the parts below give 2.16.
"""


@dataclass(frozen=True)
class HostPart:
    """Some processes of a node. Bytes of one of them: process: without a model; model: what the model adds for sure.

    passes: at most, what is there for a time: activations and logits, or a checkpoint that is written.
    """

    who: str
    count: int
    process: float
    model: float = 0.0
    passes: float = 0.0
    why: str = ""

    @property
    def whole(self) -> float:
        """Of all of them, at most."""
        return self.count * (self.process + self.model + self.passes)

    @property
    def row(self) -> TableRow:
        added = f" + {gib(self.model + self.passes)}: {self.why}" if self.why else ""
        name = f"{self.count} {self.who}{'' if self.count == 1 else 's'}"
        return name, gib(self.whole), f"{gib(self.process)} without a model{added}"


def host_parts(config: Config, job: Job, spec: ModelSpec, *, cuda: bool) -> list[HostPart]:
    """What holds memory of a node's host. cuda: the model is on GPUs, and what leaves them for a time is here."""
    ranks, rollout = job.node_ranks or job.world_size, config.rollout
    most = peak_memory(spec, Split.of(config.policy, job.world_size))
    kept = most.while_sampling("none")
    if cuda:
        offload = config.policy.offload  # gradients are freed, not moved
        moved = 0 if offload == "none" else kept - most.gradients - most.while_sampling(offload)
        why = f"policy.offload: {offload}, and a checkpoint that is written"
        parts = [HostPart("trainer rank", ranks, TRAINER, moved, most.weights + most.optimizer, why)]
    else:
        passes = most.activations + most.head
        parts = [HostPart("trainer rank", ranks, TRAINER, kept, passes, "optimizer state, activations")]
    parts.append(HostPart("reward worker", config.reward.workers, SCORER))
    parts.append(HostPart("reward server", 1, SCORER))
    if not needs_engines(config):
        return parts
    if needs_sandbox(rollout) and config.sandbox.url is None:
        parts.append(HostPart("sandbox", 1, SANDBOX))
    weights = model_parameters(spec)[0] * ELEMENT_BYTES[config.engine_dtype]
    if cuda:
        asleep, why = (weights, "weights while it sleeps") if shares_gpus(config) else (0, "")
        here = -(-engine_count(config) // config.cluster.nodes)
        return [*parts, HostPart("engine", here, ENGINE, asleep, why=why), HostPart("Ray node", 1, RAY)]
    cache = CpuCache.of(config, spec, free_memory()).mb * MIB
    here = -(-engine_count(config) // config.cluster.nodes)
    parts.append(HostPart("engine", here, ENGINE, weights + cache, why=f"weights, and {gib(cache)} of KV cache"))
    travelling = _travelling_bytes(config, spec, ranks / job.world_size)
    return [*parts, HostPart("Ray node", 1, RAY, travelling, why="weights on their way to engines")]


def _travelling_bytes(config: Config, spec: ModelSpec, of_ranks: float) -> float:
    """The copies of the pipeline stages whose first ranks are on this node. of_ranks: part of all ranks on it."""
    stages = config.policy.pipeline_model_parallel_size
    weights = model_parameters(spec)[0] * ELEMENT_BYTES[config.policy.dtype]
    return weights * ceil(of_ranks * stages) / stages


def host_table(config: Config, job: Job, spec: ModelSpec, *, cuda: bool) -> list[TableRow]:
    """Rows (which processes, size, of what), and their sum. cuda: see `host_parts`."""
    parts = host_parts(config, job, spec, cuda=cuda)
    whole = gib(sum(part.whole for part in parts))
    missing = f"programs in the sandbox{' and libraries of CUDA' if cuda else ''} not counted"
    return [*(part.row for part in parts), ("together", whole, missing)]
