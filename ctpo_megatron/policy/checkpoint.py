"""Megatron distributed checkpoints: saved now or in the background, and restored after strict checks."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import multiprocessing
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

# torch derives this from BaseException.
from torch.distributed.checkpoint.api import CheckpointException as DistributedWriteError

from ctpo_megatron.base.run_paths import step_name
from ctpo_megatron.base.signals import children_spared
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.policy import checkpoint_files as files
from ctpo_megatron.policy import random_state
from ctpo_megatron.policy.checkpoint_files import CheckpointError, Marker
from ctpo_megatron.policy.checkpoint_fit import check_fit, check_settings, model_settings
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.parallel import Layout, gather_objects

log = logging.getLogger(__name__)

_POLL_S = 0.05
_CUT_SHORT = ("PytorchStreamWriter failed", "inline_container", "No space left", "Disk quota", "File too large")
"""Longest part of an error text of torch's writers or of the system that a message quotes."""
_CONFIGURED = ("max_lr", "min_lr", "betas", "eps")
# megatron-core 0.16 can no longer save the default format; this one reshards over TP, PP and DP.
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a rank that a checkpoint holds, except its random streams.

    settings: configuration keys that decide which tensors exist, with their values.
    """

    model: BuiltModel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    settings: Mapping[str, Any]


class Writer:
    """Writes checkpoints, at most one at a time; every method is collective.

    timeout_s: deadline of a save, counted from when `finish` begins to wait for it.
    """

    def __init__(self, layout: Layout, timeout_s: float) -> None:
        self._layout = layout
        self._timeout_s = timeout_s
        self._queue = AsyncCallsQueue()
        self._aside = Path()
        atexit.register(self._abandon)

    def save(
        self,
        directory: Path,
        step: int,
        state: TrainState,
        run_state: dict[str, Any],
        config: CheckpointConfig,
        score: float | None,
        attached: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Path:
        """Write `<directory>/step_%06d`; it exists under that name only when complete.

        run_state: JSON-serializable state of the driver; rank 0's is kept, as are its `score` (see
        `checkpoint.keep_best`) and `attached`, further files by name. With `config.asynchronous` a copy of this process
        writes while training continues. A later call of `finish` or `save` then completes the checkpoint and deletes
        older ones. Raises CheckpointError when a file could not be written, now or by an earlier save in the
        background.
        """
        self.finish()
        _start_results_queue()
        aside: Path = self._layout.on_rank_zero(lambda: files.begin(directory, step))
        self._aside = aside
        # The state that is neither model nor optimizer is written synchronously, with torch.save.
        with _named_failure(aside, RuntimeError):
            request = dist_checkpointing.save(
                _shards(state, is_loading=False)
                | {"scheduler": state.scheduler.state_dict(), "random": _random_streams(self._layout)},
                str(aside),
                async_sharded_save=True,
                content_metadata=dict(_FORMAT),
            )
        with _named_failure(aside):  # megatron takes a folder that is not empty for a broken checkpoint
            for name, content in attached.items():
                (aside / name).write_bytes(content)
        settings = {**state.settings, **model_settings(state.model.spec)}
        request.add_finalize_fn(partial(self._publish, aside, step, run_state, config, score, settings))
        with _named_failure(aside):
            self._queue.schedule_async_request(request)
        if not config.asynchronous:
            self.finish()  # the request's own wait has no deadline for a writer that was killed
        return directory / step_name(step)

    def finish(self, *, wait: bool = True) -> None:
        """Complete the background save, if there is one; without `wait`, only if it is done.

        Raises CheckpointError when it fails or is late.
        """
        # Count polls instead of seconds: all ranks must stop waiting at the same poll.
        for _ in range(max(1, round(self._timeout_s / _POLL_S))):
            with _named_failure(self._aside):
                self._queue.maybe_finalize_async_calls(blocking=False)
            if not wait or not self._queue.get_num_unfinalized_calls():
                return
            time.sleep(_POLL_S)
        raise CheckpointError(
            f"the processes that write a checkpoint are not done after {self._timeout_s:g} s (policy.timeout_minutes); "
            f"is the file system of {self._aside.parent} stuck, or was one of them killed (out of memory)?"
        )

    def _abandon(self) -> None:
        """At exit: a save that cannot be completed any more is useless and must not keep the job alive."""
        for call in self._queue.async_calls:
            if call.async_caller.process is not None:
                call.async_caller.process.kill()

    def _publish(
        self,
        aside: Path,
        step: int,
        run_state: dict[str, Any],
        config: CheckpointConfig,
        score: float | None,
        settings: Mapping[str, Any],
    ) -> None:
        rank, names = self._layout.rank, [path.name for path in aside.iterdir()]
        mine = [name for name in names if name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))]
        shares = gather_objects(files.digests(aside, mine))
        manifest = {name: entry for share in shares for name, entry in share.items()}
        marker = Marker(step, score, run_state, dict(sorted(manifest.items())), dict(settings))
        self._layout.on_rank_zero(
            lambda: files.publish(aside, marker, keep_last=config.keep_last, keep_best=config.keep_best)
        )


class _PickledQueue:
    """Megatron's queue of results, with values sent as bytes, so that its process need not import torch to unpickle."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, results: Any) -> None:
        self._queue.put(pickle.dumps(results))

    def get_nowait(self) -> Any:
        return pickle.loads(self._queue.get_nowait())


def _start_results_queue() -> None:
    """Start megatron's results queue, one process for all saves, so that it survives a signal to the whole job."""
    others = multiprocessing.active_children()
    try:
        with children_spared():
            queue = filesystem_async._get_write_results_queue()
        if not isinstance(queue, _PickledQueue):
            filesystem_async._results_queue = _PickledQueue(queue)
    finally:
        for child in multiprocessing.active_children():
            if child not in others:
                # At exit multiprocessing would wait forever for a queue that was interrupted during its start.
                atexit.register(child.kill)


@contextmanager
def _named_failure(aside: Path, *also: type[Exception]) -> Iterator[None]:
    """Delete `aside` and raise CheckpointError with a plain reason when writing a checkpoint into it fails."""
    directory = aside.parent
    kinds: tuple[type[BaseException], ...] = (OSError, DistributedWriteError, *also)
    try:
        yield
    except kinds as error:
        if isinstance(error, DistributedWriteError):
            # The exception's text is the tracebacks of all ranks.
            reason = "; ".join(f"rank {rank}: {found[0]}" for rank, found in error.failures.items())
        else:
            reason = str(error)
        if any(text in reason for text in _CUT_SHORT):
            reason = "a file could not be written to its end: the disk is full, or a quota or limit is reached"
        free = shutil.disk_usage(directory).free
        files.discard(aside)
        raise CheckpointError(
            f"a checkpoint could not be written to {directory}: {reason}; "
            f"{free / 2**30:.1f} GiB were free there, and what was written of it is deleted "
            "(checkpoint.keep_last and keep_best decide how many checkpoints stay)"
        ) from error


def load(checkpoint: Path, layout: Layout, state: TrainState) -> dict[str, Any]:
    """Restore a complete checkpoint of any parallel layout and return the driver's state in it.

    Files, and names, shapes and dtypes of all tensors, are checked before anything is copied. Random streams are
    restored when the layout is the same; a rank of another layout has no counterpart. Raises CheckpointError.
    """
    marker = verify(checkpoint, layout)
    check_settings(checkpoint, marker.settings, state.settings)
    wanted = _shards(state, is_loading=True)
    check_fit(checkpoint, wanted, state.model.spec.vocab_size)
    check_settings(checkpoint, marker.settings, model_settings(state.model.spec))
    try:
        loaded = dist_checkpointing.load(wanted, str(checkpoint))
    except CheckpointingException as error:
        raise CheckpointError(f"{checkpoint} cannot be loaded: {error}") from error
    state.model.load_state(loaded["model"])
    if _inner_adamw(state.optimizer):
        _name_step_zero(loaded["optimizer"])
    with _configured(state.optimizer):
        state.optimizer.load_state_dict(loaded["optimizer"])
    _separate_steps(state.optimizer)
    state.scheduler.load_state_dict(loaded["scheduler"])
    if loaded["random"]["layout"] == _sizes(layout):
        random_state.restore(loaded["random"]["ranks"][layout.rank])
    else:
        log.info("%s was written in another layout: random streams start again from run.seed", checkpoint)
    log.info("restored %s", checkpoint)
    return marker.run


def load_weights(checkpoint: Path, layout: Layout, model: BuiltModel) -> dict[str, Any]:
    """Restore only the weights of a complete checkpoint of any layout; returns the driver's state. Same checks as
    `load`.

    Weights of another precision are converted, with a line in the log.
    """
    marker = verify(checkpoint, layout)
    wanted = {"model": model.sharded_state(_metadata())}
    check_fit(checkpoint, wanted, model.spec.vocab_size, weights_only=True)
    check_settings(checkpoint, marker.settings, model_settings(model.spec))
    try:
        loaded = dist_checkpointing.load(wanted, str(checkpoint))
    except CheckpointingException as error:
        raise CheckpointError(f"{checkpoint} cannot be loaded: {error}") from error
    model.load_state(loaded["model"])
    log.info("restored the weights of %s", checkpoint)
    return marker.run


def verify(checkpoint: Path, layout: Layout) -> Marker:
    """Compare every file with the manifest; each rank reads its share. Collective.

    Raises CheckpointError on every rank, naming all broken files and an older intact checkpoint.
    """
    marker: Marker = layout.on_rank_zero(lambda: files.read_marker(checkpoint))
    problems: list[str] = layout.on_rank_zero(lambda: files.size_problems(checkpoint, marker.files))
    if not problems:
        mine = sorted(marker.files)[layout.rank :: layout.world_size]
        found = gather_objects(files.content_problems(checkpoint, marker.files, mine))
        problems = [problem for part in found for problem in part]
    if problems:
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}{files.advice(checkpoint)}")
    return marker


def _metadata() -> dict[str, Any]:
    return _FORMAT | {
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _shards(state: TrainState, *, is_loading: bool) -> dict[str, Any]:
    """This rank's part of model and optimizer as megatron's sharded tensors."""
    metadata = _metadata()
    # So that a checkpoint before the first step has the same tensors as any other.
    _fill_state(state.optimizer)
    weights = state.model.sharded_state(metadata)
    optimizer = state.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": optimizer}


def _random_streams(layout: Layout) -> dict[str, Any]:
    return {"layout": _sizes(layout), "ranks": gather_objects(random_state.capture())}


def _sizes(layout: Layout) -> dict[str, int]:
    names = (field.name for field in dataclasses.fields(layout) if field.name.endswith("_size"))
    return {name: getattr(layout, name) for name in names}


def _inner_adamw(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o.optimizer for o in chained if isinstance(o.optimizer, torch.optim.AdamW)]


def _fill_state(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer state that the first step would create, to save it or to load into it."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:  # a rank may have no dense, or no expert parameters
            part.init_state_fn(part.optimizer, part.config)
    for inner in _inner_adamw(optimizer):
        for state in inner.state.values():
            # Megatron's own function omits the per-parameter `step` of torch's AdamW.
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _name_step_zero(saved: dict[Any, Any]) -> None:
    """Megatron omits a step of 0 from a checkpoint (`if step:`), but AdamW cannot be loaded without it."""
    if isinstance(saved.get("state"), dict) and "param_groups" in saved:
        saved["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))
    for inner in saved.values():
        if isinstance(inner, dict):
            _name_step_zero(inner)


@contextmanager
def _configured(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Keep the configured values of every parameter group while a checkpoint is loaded.

    megatron-core restores whole groups from a checkpoint, and its scheduler prefers their rates to its own.
    """
    ours = [{name: group[name] for name in _CONFIGURED if name in group} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, ours, strict=True):
        group.update(values)


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Loading makes all parameters share one `step` tensor, which would then advance once per parameter."""
    for inner in _inner_adamw(optimizer):
        for state in inner.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()
