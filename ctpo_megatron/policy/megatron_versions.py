"""The two releases of megatron-core that the trainer runs on, and everything in which they differ for it.

0.16.1 is the last for Python 3.11; 0.19.2 needs 3.12. The other files of this package are written for both. Checkpoints
of each load in the other.

0.19 deprecates `GPTModel` for `HybridModel`. What that needs, by its sources:
- two layers for each decoder layer (`*-` or `*E` in `hybrid_layer_pattern`), so other name tables, and a translation of
  checkpoints; `|` in the pattern between stages;
- a stack of ours without Transformer Engine, which its specs lack, with norms of q and k in the attention;
- `position_embedding_type`, and frequencies of ours for Llama 3.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import signal
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import common
from torch import load as torch_load
from torch.distributed import checkpoint as torch_checkpoint

from ctpo_sandbox.isolation.libc import die_with_parent

VERSION = importlib.metadata.version("megatron-core")
"""The installed release, such as `0.19.2`."""

RELEASE = tuple(int(part) for part in VERSION.split(".")[:2])
"""Its first two numbers, such as (0, 19)."""

_IS_0_19 = RELEASE >= (0, 19)

LATENT_ROTARY = "mla_rotary_interleaved" if _IS_0_19 else "multi_latent_attention"
"""Keyword by which rotary embeddings learn of latent attention."""

COMMON_STATE = "common_state"
"""Key of the state that is neither model nor optimizer in checkpoints of 0.19; 0.16 writes it to a file."""


def begin_save(state: dict[str, Any], folder: Path, content: dict[str, Any]) -> Any:
    """Megatron's request to write a checkpoint, to be scheduled. content: says what it holds. Collective.

    The processes that write end with this one: a later start may write to the same folder.
    """
    # By default 0.19 writes by the package nvidia-resiliency-ext.
    ours = {"async_strategy": "mcore"} if _IS_0_19 else {}
    request = dist_checkpointing.save(state, str(folder), async_sharded_save=True, content_metadata=content, **ours)
    if request.async_fn is None:
        return request
    return request._replace(async_fn=partial(_write_and_end_with, os.getpid(), request.async_fn))


def _write_and_end_with(trainer: int, write: Callable[..., None], *arguments: Any, **options: Any) -> None:
    die_with_parent(trainer, signal.SIGKILL)
    os.register_at_fork(after_in_child=partial(die_with_parent, os.getpid(), signal.SIGKILL))  # one for each file
    write(*arguments, **options)


def load(wanted: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the sharded tensors that are `wanted`, and all other state, from a checkpoint of either release.
    Collective.

    Raises megatron's CheckpointingException.
    """
    ours = {}
    if not _IS_0_19 and not (checkpoint / common.COMMON_STATE_FNAME).exists():
        ours["common_strategy"] = _common_state_among_the_shards()
    loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(checkpoint), **ours)
    return loaded


def _common_state_among_the_shards() -> Any:
    """A strategy for 0.16 that reads what 0.19 wrote (as `load_common_state_dict` of 0.19 does)."""

    class Strategy(common.TorchCommonLoadStrategy):  # type: ignore[misc] # 0.19 has none
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            key = ShardedObject(COMMON_STATE, None, (1,), (0,)).unique_key
            found: dict[str, Any] = {key: io.BytesIO()}
            reader = torch_checkpoint.FileSystemReader(checkpoint_dir)
            torch_checkpoint.load(found, storage_reader=reader, no_dist=True)
            content = found[key]
            if isinstance(content, io.BytesIO):
                content.seek(0)
                content = torch_load(content, weights_only=True)
            return content[0]

    return Strategy()


_failures: list[Exception] = []
"""Why files could not be written, in the process that writes them."""


def noting_failures(write: Callable[..., Any]) -> Any:
    """Wraps 0.19's `write_preloaded_data`, of one file: its failures are noted for `telling_failures`."""

    @wraps(write)
    def noted(*arguments: Any, **options: Any) -> Any:
        output = write(*arguments, **options)
        if output is not None and isinstance(output[1], Exception):
            _failures.append(output[1])
        return output

    return staticmethod(noted)


def telling_failures(write: Callable[..., None]) -> Any:
    """Wraps 0.19's `write_preloaded_data_multithread`: the trainer learns why a file could not be written.

    The original asserts that there is no failure. It reports the type of the failure alone, or dies of it in silence.
    """

    @wraps(write)
    def told(*arguments: Any) -> None:
        *others, results = arguments
        held = _Held()
        try:
            write(*others, held)
        except AssertionError:
            if not _failures:
                raise
        results.put(_failures[0] if _failures else held.results)

    return staticmethod(told)


class _Held:
    """A queue of one."""

    results: Any = None

    def put(self, results: Any) -> None:
        self.results = results
