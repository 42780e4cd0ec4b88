"""Megatron distributed checkpoints: saved now or in the background, and restored after strict checks."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata
from megatron.core.tensor_parallel import random as megatron_random

# torch derives this from BaseException.
from torch.distributed.checkpoint.api import CheckpointException as DistributedWriteError

from ctpo_megatron.base.files import patiently
from ctpo_megatron.base.run_paths import step_name
from ctpo_megatron.base.stop import children_spared
from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.models import ModelSpec, padded_vocabulary
from ctpo_megatron.policy import checkpoint_files as files
from ctpo_megatron.policy import megatron_versions
from ctpo_megatron.policy.checkpoint_files import (
    CheckpointError,
    CheckpointWriteError,
    Marker,
    loaded_as_data,
    read_description,
)
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.optimizer import OptimizerSteps
from ctpo_megatron.policy.parallel import Layout, gather_objects
from ctpo_sandbox.isolation.libc import die_with_parent

log = logging.getLogger(__name__)

# megatron-core 0.16 can no longer save the default format; this one reshards over TP, PP and DP.
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
_POLL_S = 0.05
_CUT_SHORT = ("PytorchStreamWriter failed", "inline_container", "No space left", "Disk quota", "File too large")
"""In errors of torch's writers or of the system: the file could not be written to its end."""
_NO_RESULTS = "results_queue should not be empty"
_MOST_TENSOR_PARALLEL = 64


def _metadata() -> dict[str, Any]:
    return FORMAT | {
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _sizes(layout: Layout) -> dict[str, int]:
    names = (field.name for field in fields(layout) if field.name.endswith("_size"))
    return {name: getattr(layout, name) for name in names}


def random_streams() -> dict[str, Any]:
    """State of Python's, numpy's, torch's and the device's generators and of megatron's named streams.

    Plain containers and tensors only: `torch.load` restores them without running code.
    """
    legacy = cast(tuple[str, np.ndarray[Any, Any], int, int, float], np.random.get_state())
    name, keys, position, has_gauss, cached = legacy
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        # On the CPU these two are replaced by functions of the CPU generator (replacements.py).
        "device": megatron_random._get_cuda_rng_state(),
        "streams": dict(megatron_random.get_cuda_rng_tracker().get_states()),
    }


def set_random_streams(state: dict[str, Any]) -> None:
    """Inverse of `random_streams`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    megatron_random._set_cuda_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
    megatron_random.get_cuda_rng_tracker().set_states(state["streams"])


class _PickledQueue:
    """Megatron's queue of results, with values sent as bytes, so that its process need not import torch to unpickle."""

    def __init__(self, manager: SyncManager) -> None:
        self._manager, self._queue = manager, manager.Queue()

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        process: BaseProcess = self._manager._process  # type: ignore[attr-defined]
        return process.is_alive()

    def put(self, results: Any) -> None:
        self._queue.put(pickle.dumps(results))

    def get_nowait(self) -> Any:
        try:
            return pickle.loads(self._queue.get_nowait())
        except EOFError as error:  # an OSError, as where it went before the connection was made
            raise ConnectionResetError(
                "the process that collects writers' results has ended; was it killed?"
            ) from error


def start_results_queue() -> None:
    """Start megatron's queue of results unless it lives: one process for all saves.

    It survives a signal to the whole job, and ends with this process. Raises CheckpointWriteError when it does
    not start in two attempts.
    """
    queue: _PickledQueue | None = filesystem_async._results_queue
    if queue is not None and queue.lives:
        return
    for is_last in (False, True):
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        try:
            with children_spared():
                manager.start(die_with_parent, (os.getpid(), signal.SIGKILL))
            filesystem_async._results_queue = _PickledQueue(manager)
            return
        except (EOFError, OSError) as error:
            why = f"the process that collects writers' results did not start ({error!r}): was memory short?"
            if is_last:
                raise CheckpointWriteError(f"no checkpoint can be written: {why}") from error
            log.warning("%s It is started again", why)


class CheckpointStore:
    """Saves and loads the state of training, at most one save at a time; every method is collective.

    `policy.timeout_minutes` is the deadline of a save, counted from when `finish` begins to wait for it.
    """

    def __init__(self, model: BuiltModel, layout: Layout, policy: PolicyConfig) -> None:
        self._model, self._layout, self._policy = model, layout, policy
        self._timeout_s = policy.timeout_minutes * 60
        self._queue = AsyncCallsQueue()
        self._aside = Path()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attached")
        self._attached: list[Future[None]] = []
        # Of the queue alone: this object would live on with its trainer, and end in a forked child, which clears the
        # callbacks; the store of a job of several ranks joins a thread then, which no child has.
        atexit.register(_abandon, self._queue)

    def save(
        self,
        directory: Path,
        step: int,
        steps: OptimizerSteps,
        run_state: dict[str, Any],
        config: CheckpointConfig,
        score: float | None,
        attached: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
    ) -> Path:
        """Write `<directory>/step_%06d`; it exists under that name only when complete.

        run_state: JSON-serializable state of the driver; rank 0's is kept, as are its `score` (see
        `checkpoint.keep_best`) and `attached`, further files by name, whose content a thread makes meanwhile. With
        `config.asynchronous` a copy of this process writes while training continues. A later call of `finish` or `save`
        then completes the checkpoint and deletes older ones. Raises CheckpointWriteError when a file could not be
        written, now or by an earlier save in the background.
        """
        self.finish()
        start_results_queue()
        aside: Path = self._layout.on_rank_zero(lambda: patiently(lambda: files.begin(directory, step), directory))
        self._aside = aside
        # 0.16 writes the state that is neither model nor optimizer now, with torch.save.
        with _named_failure(aside):
            content = self._shards(steps, is_loading=False) | {
                "scheduler": steps.scheduler.state_dict(),
                "random": {"layout": _sizes(self._layout), "ranks": gather_objects(random_streams())},
            }
            request = megatron_versions.begin_save(content, aside, dict(FORMAT))
        marker = Marker(step, score, run_state, {}, {**self._settings(steps), **model_settings(self._model.spec)})
        request.add_finalize_fn(partial(self._publish, aside, marker, config))
        with _named_failure(aside):
            self._queue.schedule_async_request(request)
        # Only now: the fork of a process that writes is not to meet a thread of ours, and megatron takes a folder that
        # is not empty for a broken checkpoint.
        self._attached = [self._thread.submit(_attach, aside / name, content) for name, content in attached.items()]
        if not config.asynchronous:
            self.finish()  # the request's own wait has no deadline for a writer that was killed
        return directory / step_name(step)

    def finish(self, *, wait: bool = True) -> None:
        """Complete the background save, if there is one; without `wait`, only if it is done.

        Raises CheckpointWriteError when it fails or is late; after a failure another save may begin.
        """
        # Count polls instead of seconds: all ranks must stop waiting at the same poll.
        for _ in range(max(1, round(self._timeout_s / _POLL_S))):
            with _named_failure(self._aside):
                self._queue.maybe_finalize_async_calls(blocking=False)
            if not wait or not self._queue.get_num_unfinalized_calls():
                return
            time.sleep(_POLL_S)
        late = CheckpointWriteError(
            f"the processes that write a checkpoint are not done after {self._timeout_s:g} s (policy.timeout_minutes); "
            f"is the file system of {self._aside.parent} stuck, or was one of them killed (out of memory)?"
        )
        late.late = True
        raise late

    def _publish(self, aside: Path, marker: Marker, config: CheckpointConfig) -> None:
        """Give the folder its name, with a marker that lists the files of all ranks; collective."""
        self._layout.on_rank_zero(lambda: [attached.result(self._timeout_s) for attached in self._attached] and None)
        rank, names = self._layout.rank, [path.name for path in aside.iterdir()]
        mine = [name for name in names if name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))]
        shares = gather_objects(files.digests(aside, mine))
        manifest = {name: entry for share in shares for name, entry in share.items()}
        whole = replace(marker, files=dict(sorted(manifest.items())))
        self._layout.on_rank_zero(
            lambda: files.publish(aside, whole, keep_last=config.keep_last, keep_best=config.keep_best)
        )

    def _shards(self, steps: OptimizerSteps | None, *, is_loading: bool) -> dict[str, Any]:
        """Return this rank's weights, and with `steps` the state of the optimizer, as megatron's sharded tensors."""
        weights = self._model.sharded_state(_metadata())
        if steps is None:
            return {"model": weights}
        return {"model": weights, "optimizer": steps.sharded_state(weights, _metadata(), is_loading=is_loading)}

    def _settings(self, steps: OptimizerSteps) -> dict[str, Any]:
        """Return the configuration keys that decide which tensors exist, with their values."""
        return {
            "policy.dtype": self._policy.dtype,
            "policy.use_distributed_optimizer": self._policy.use_distributed_optimizer,
            "optimizer.weight_decay_of": steps.weight_decay_of,
        }

    def load(self, checkpoint: Path, steps: OptimizerSteps | None) -> dict[str, Any]:
        """Restore a complete checkpoint of any parallel layout and return the driver's state in it.

        steps: None for the weights only, which are converted from another precision. Files, and names, shapes and
        dtypes of all tensors, are checked before anything is copied. Random streams are restored when the layout is the
        same; a rank of another layout has no counterpart. Raises CheckpointError.
        """
        marker, spec = self._verified(checkpoint), self._model.spec
        if steps is not None:
            check_settings(checkpoint, marker.settings, self._settings(steps))
        wanted = self._shards(steps, is_loading=True)
        check_fit(checkpoint, wanted, spec.vocab_size, weights_only=steps is None)
        check_settings(checkpoint, marker.settings, model_settings(spec))
        with loaded_as_data(checkpoint):
            loaded = megatron_versions.load(wanted, checkpoint)
        self._model.load_state(loaded["model"])
        if steps is not None:
            steps.load_state(loaded["optimizer"], loaded["scheduler"])
            if loaded["random"]["layout"] == _sizes(self._layout):
                set_random_streams(loaded["random"]["ranks"][self._layout.rank])
            else:
                log.info("%s was written in another layout: random streams start again from run.seed", checkpoint)
        log.info("restored %s%s", "" if steps is not None else "the weights of ", checkpoint)
        return marker.run

    def _verified(self, checkpoint: Path) -> Marker:
        """Compare every file with the manifest; each rank reads its share.

        Raises CheckpointError on every rank, naming all broken files and an older intact checkpoint.
        """
        layout = self._layout
        marker: Marker = layout.on_rank_zero(lambda: files.read_checkpoint_marker(checkpoint))
        problems: list[str] = layout.on_rank_zero(lambda: files.size_problems(checkpoint, marker.files))
        if not problems:
            mine = sorted(marker.files)[layout.rank :: layout.world_size]
            found = gather_objects(files.content_problems(checkpoint, marker.files, mine))
            problems = [problem for part in found for problem in part]
        if problems:
            raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}{files.advice(checkpoint)}")
        return marker


def _abandon(queue: AsyncCallsQueue) -> None:
    """At exit: a save that cannot be completed any more is useless and must not keep the job alive."""
    for call in queue.async_calls:
        if call.async_caller.process is not None:
            call.async_caller.process.kill()


def _attach(path: Path, content: Callable[[], bytes]) -> None:
    """Raises OSError, which says that the checkpoint could not be written, whatever fails."""
    try:
        path.write_bytes(content())
    except Exception as error:
        raise OSError(f"{path.name} could not be made: {error}") from error


@contextmanager
def _named_failure(aside: Path) -> Iterator[None]:
    """Delete `aside` and raise CheckpointWriteError with a plain reason when writing a checkpoint into it fails."""
    directory = aside.parent
    kinds: tuple[type[BaseException], ...] = (OSError, DistributedWriteError, RuntimeError)
    try:
        yield
    except kinds as error:
        reason = str(error)
        if isinstance(error, DistributedWriteError):
            # The exception's text is the tracebacks of all ranks.
            reason = "; ".join(f"rank {rank}: {found[0]}" for rank, found in error.failures.items())
        full = any(text in reason for text in _CUT_SHORT)
        if isinstance(error, RuntimeError) and not full:
            raise  # of a collective, as when another rank is gone
        if full:
            reason = "a file could not be written to its end: the disk is full, or a quota or limit is reached"
        elif _NO_RESULTS in reason:
            reason = "a process that writes ended before its end; was it killed (out of memory)?"
        free = shutil.disk_usage(directory).free
        shutil.rmtree(aside, ignore_errors=True)
        failed = CheckpointWriteError(
            f"a checkpoint could not be written to {directory}: {reason}; "
            f"{free / 2**30:.1f} GiB were free there, and what was written of it is deleted "
            "(checkpoint.keep_last and keep_best decide how many checkpoints stay)"
        )
        failed.full = full
        raise failed from error


def model_settings(spec: ModelSpec) -> dict[str, Any]:
    """Properties of the model other than its tensors, by name, for `check_settings`."""
    return {f"{name} of model.path": value for name, value in spec.unseen.items()}


def check_settings(checkpoint: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises CheckpointError naming the keys whose values differ."""
    other = [f"{key} was {saved[key]} and is {ours[key]}" for key in saved if key in ours and saved[key] != ours[key]]
    if other:
        raise CheckpointError(
            f"{checkpoint} was written under another configuration; nothing was loaded: {'; '.join(other)}. Give the "
            "former value, or start a new run from an export of it"
        )


def check_fit(checkpoint: Path, wanted: dict[str, Any], vocab_size: int, *, weights_only: bool = False) -> None:
    """Compare what all ranks request with what the checkpoint holds; raises CheckpointError with every difference.

    weights_only: the rest of the checkpoint is ignored, and the precision may differ.
    """
    sharded, _, _ = load_preprocess(wanted)
    _, by_rank = determine_global_metadata(extract_sharded_base(sharded)[0])
    ours = {part.key: part for rank in by_rank for part in rank}
    saved = {part.key: part for part in read_description(checkpoint).values()}
    saved.pop(megatron_versions.COMMON_STATE, None)
    problems = [f"{key} is not in the checkpoint" for key in sorted(ours.keys() - saved.keys())]
    surplus = [] if weights_only else sorted(saved.keys() - ours.keys())
    problems += [f"{key} is not in this model and optimizer" for key in surplus]
    for key in sorted(ours.keys() & saved.keys()):
        there = saved[key]
        if weights_only and isinstance(there, ShardedTensor) and isinstance(ours[key], ShardedTensor):
            there = replace(there, dtype=ours[key].dtype)  # torch converts when it copies
        have, want = _form(there), _form(ours[key])
        # The padding of the vocabulary depends on the tensor-parallel size: megatron truncates or extends it.
        if have != want and not _padded_differently(there, ours[key], vocab_size):
            problems.append(f"{key} is {have} in the checkpoint and {want} here")
    if problems:
        raise CheckpointError(
            f"{checkpoint} is of another model, precision or optimizer; nothing was loaded:\n  "
            + "\n  ".join(problems)
            + "\nContinue with the model.path and policy of the run that wrote it"
        )


def _padded_differently(
    saved: ShardedTensor | ShardedObject, ours: ShardedTensor | ShardedObject, vocab_size: int
) -> bool:
    if not (isinstance(saved, ShardedTensor) and isinstance(ours, ShardedTensor) and ours.allow_shape_mismatch):
        return False
    rows = {padded_vocabulary(vocab_size, tensor_parallel) for tensor_parallel in range(1, 1 + _MOST_TENSOR_PARALLEL)}
    return (
        saved.dtype == ours.dtype and saved.global_shape[1:] == ours.global_shape[1:] and saved.global_shape[0] in rows
    )


def _form(part: ShardedTensor | ShardedObject) -> str:
    shape = "x".join(map(str, part.global_shape))
    return f"{str(part.dtype).removeprefix('torch.')} {shape}" if isinstance(part, ShardedTensor) else f"object {shape}"
