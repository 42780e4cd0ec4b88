"""Memory of a run on the host of a node: what its processes hold without a model, measured, and what the model adds."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ctpo_megatron.config import Config, Job, engine_count, needs_engines, shares_gpus
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan.memory import (
    ELEMENT_BYTES,
    MIB,
    CpuCache,
    Split,
    TableRow,
    free_memory,
    gib,
    model_parameters,
    peak_memory,
)

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


def host_parts(config: Config, job: Job, spec: ModelSpec) -> list[HostPart]:
    """Return what holds memory of a node's host. On CUDA the model is on GPUs, and what leaves them for a time
    is here.
    """
    ranks, rollout = job.node_ranks or job.world_size, config.rollout
    most = peak_memory(spec, Split.of(config.policy, job.world_size))
    kept = most.while_sampling("none")
    if job.cuda:
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
    if rollout.needs_sandbox and config.sandbox.url is None:
        parts.append(HostPart("sandbox", 1, SANDBOX))
    weights = model_parameters(spec)[0] * ELEMENT_BYTES[config.engine_dtype]
    here = -(-engine_count(config) // config.cluster.nodes)
    if job.cuda:
        asleep, why = (weights, "weights while it sleeps") if shares_gpus(config) else (0, "")
        return [*parts, HostPart("engine", here, ENGINE, asleep, why=why), HostPart("Ray node", 1, RAY)]
    cache = CpuCache.of(config, spec, free_memory()).mb * MIB
    parts.append(HostPart("engine", here, ENGINE, weights + cache, why=f"weights, and {gib(cache)} of KV cache"))
    # Copies of the pipeline stages whose first ranks are on this node.
    stages, sent = (
        config.policy.pipeline_model_parallel_size,
        model_parameters(spec)[0] * ELEMENT_BYTES[config.policy.dtype],
    )
    travelling = sent * ceil(ranks / job.world_size * stages) / stages
    return [*parts, HostPart("Ray node", 1, RAY, travelling, why="weights on their way to engines")]


def host_table(config: Config, job: Job, spec: ModelSpec) -> list[TableRow]:
    """Rows (which processes, size, of what), and their sum."""
    parts = host_parts(config, job, spec)
    whole = gib(sum(part.whole for part in parts))
    missing = f"programs in the sandbox{' and libraries of CUDA' if job.cuda else ''} not counted"
    return [*(part.row for part in parts), ("together", whole, missing)]
