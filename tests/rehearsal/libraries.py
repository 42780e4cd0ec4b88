"""What a rehearsal takes of the libraries of a CUDA environment, whose kernels want the driver of a real GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

COMPILED = {"transformer_engine", "apex", "amp_C", "flash_attn"}
"""They launch kernels of their own. `fused_adam` stands for the Adams of two of them."""


class _Finder(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in COMPILED else super().find_spec(fullname, path, target)


def hide_compiled() -> None:
    """Let this process find none of `COMPILED`, as where they are not installed."""
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder


def choose_platform_of_vllm() -> None:
    """Make it the CPU's, before anything imports vLLM: a CUDA build without a GPU has no platform at all."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms.current_platform = CpuPlatform()
