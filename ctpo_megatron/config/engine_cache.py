"""The KV cache of an engine: the bytes of a token, and its size on a CPU where the configuration gives none."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ctpo_megatron.config.memory import ELEMENT_BYTES
from ctpo_megatron.config.placement import engine_count
from ctpo_megatron.config.schema import Config
from ctpo_megatron.models import ModelSpec

MIB = 1 << 20
SHARE = 0.5
"""Of a CPU machine's free memory, for the caches of its engines; weights, the trainer and programs have the rest."""
_BLOCK = 32
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


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
