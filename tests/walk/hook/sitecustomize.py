"""Records which functions of ours a process enters while a row or a weight passes through it; see `tests.walk`.

Python imports this file when a process starts that has this folder in PYTHONPATH. Nothing is recorded, and nothing is
slower, until a method of `DOORS` is called. From then on a profile function sees each call that the method causes:

- the calls below it in the same thread, and in the tasks that it starts (by a context variable);
- what it gives to pools of threads, and to event loops of other threads;
- in processes that were forked, such as the reward workers, all calls while the trainer waits for its batch.

Each process appends what it enters to a file of its own at once, as workers end by SIGKILL. An error here ends the
process: a run that records nothing would be taken for one that enters nothing.
"""

from __future__ import annotations

import builtins
import contextvars
import functools
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

FOLDER, PACKAGES = "CTPO_WALK_FOLDER", "CTPO_WALK_PACKAGES"
"""Environment variables: where to record; the folders of our packages, separated as in PATH."""
FLAGS = "flags"
"""File in the folder that all processes map: bytes `STEP` and `BATCH`."""
STEP, BATCH = 0, 1
"""1 from the first RL step on: nothing before is recorded; 1 while the trainer waits for its batch."""

ROW, WEIGHTS, DOOR = "row", "weights", "door"
NEXT_BATCH = "Rollouts.next_batch"
TRAINER_DOORS = (NEXT_BATCH, "Trainer.train")
"""Between these a row passes through their callers, up to the function that calls both."""
DOORS = {
    **dict.fromkeys(TRAINER_DOORS, ROW),
    "RolloutEngine.run_group": ROW,
    "Rollouts.publish": WEIGHTS,
    "EnginePool.finish_update": WEIGHTS,
    **dict.fromkeys([f"RolloutEngine.{step}_weight_update" for step in ("start", "finish")], WEIGHTS),
    "RolloutEngine.receive_weights": WEIGHTS,
}
"""Methods of ours where a walk begins; a door inside another begins its own walk and ends it."""

# Flags of code, as in `inspect`, whose import would cost every process. Bodies of modules and classes lack the first.
_OPTIMIZED, _COROUTINE = 0x1, 0x80
_window: contextvars.ContextVar[str | None] = contextvars.ContextVar("window", default=None)


class Recorder:
    """What this process has entered."""

    def __init__(self, folder: Path, packages: tuple[str, ...]) -> None:
        with (folder / FLAGS).open("r+b") as file:
            self.flags = mmap.mmap(file.fileno(), 0)
        self._folder, self._packages = folder, packages
        self._ours: dict[str, bool] = {}
        self._known: set[tuple[str, str, str]] = set()
        self._callers: list[tuple[int, str, str]] = []
        self.forked = False

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """The profile function."""
        if event != "call" or not frame.f_code.co_flags & _OPTIMIZED:
            return
        file = _file(frame)
        if self._is_ours(file) and (window := self._open_window()):
            self.note(window, file, frame.f_code.co_qualname, frame)

    def _is_ours(self, file: str) -> bool:
        if (ours := self._ours.get(file)) is None:
            ours = self._ours[file] = file.startswith(self._packages)
        return ours

    def _open_window(self) -> str | None:
        return _window.get() or (ROW if self.forked and self.flags[BATCH] else None)

    def note(self, kind: str, file: str, function: str, frame: FrameType | None = None) -> None:
        """Record it, unless it is known or belongs to an import."""
        entry = (kind, file, function)
        if entry in self._known or any("importlib._bootstrap" in each.f_code.co_filename for each in _stack(frame)):
            return
        self._known.add(entry)
        with (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")

    def note_callers(self, frame: FrameType) -> None:
        """Record the callers of this door and of the former one, up to the function that called both."""
        ours = [each for each in _stack(frame) if self._is_ours(each.f_code.co_filename)]
        callers = [(id(each), each.f_code.co_filename, each.f_code.co_qualname) for each in reversed(ours)]
        shared = sum(1 for _ in _common(self._callers, callers))
        for _, file, function in self._callers[shared - 1 :] + callers[shared - 1 :] if shared else ():
            self.note(ROW, file, function)
        self._callers = callers

    @contextmanager
    def within(self, window: str, *, task: bool = False) -> Iterator[None]:
        """What this thread, or this task, calls belongs to the window."""
        before, token = sys.getprofile(), _window.set(window)
        sys.setprofile(self.see)
        try:
            yield
        finally:
            if not task:  # tasks of the thread that began within a window continue in it
                sys.setprofile(before)
            _window.reset(token)

    @contextmanager
    def passing(self, door: str, *, task: bool = False) -> Iterator[None]:
        """Within a door; before the first step it leads nowhere."""
        if door == NEXT_BATCH:
            self.flags[STEP] = self.flags[BATCH] = 1
        if not self.flags[STEP]:
            yield
            return
        self.note(DOOR, "", door)
        if door in TRAINER_DOORS:
            self.note_callers(sys._getframe())
        try:
            with self.within(DOORS[door], task=task):
                yield
        finally:
            if door == NEXT_BATCH:
                self.flags[BATCH] = 0

    def door(self, name: str, method: FunctionType) -> Callable[..., Any]:
        """The method, as a door."""

        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.passing(name):
                return method(*arguments, **named)

        @functools.wraps(method)
        async def call_async(*arguments: Any, **named: Any) -> Any:
            with self.passing(name, task=True):
                return await method(*arguments, **named)

        return call_async if method.__code__.co_flags & _COROUTINE else call

    def after_fork(self) -> None:
        """A forked process enters no door: its calls count while the trainer waits for a batch."""
        self.forked = True
        sys.setprofile(self.see)


def _file(frame: FrameType) -> str:
    """Where the function is written; of what a dataclass generates, the file of its class."""
    file = frame.f_code.co_filename
    return str(frame.f_globals.get("__file__", "")) if file == "<string>" else file


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _common(first: list[Any], second: list[Any]) -> Iterator[Any]:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return
        yield one


def install(recorder: Recorder) -> None:
    """Make doors of the methods of `DOORS` when their classes are made, whatever file they are in."""
    original = builtins.__build_class__

    def build(body: FunctionType, name: str, /, *bases: Any, **named: Any) -> Any:
        made = original(body, name, *bases, **named)
        if recorder._is_ours(body.__code__.co_filename):
            doors = [door for door in DOORS if door.startswith(f"{body.__qualname__}.")]
            for door in doors:
                method = door.rpartition(".")[2]
                if method in vars(made):
                    setattr(made, method, recorder.door(door, vars(made)[method]))
            if doors:
                follow(recorder)
        return made

    builtins.__build_class__ = build
    if any("multiprocessing.forkserver" in each for each in sys.orig_argv):
        os.register_at_fork(after_in_child=recorder.after_fork)


@functools.cache
def follow(recorder: Recorder) -> None:
    """Follow what is given to pools of threads and to the event loops of other threads."""
    from asyncio import BaseEventLoop
    from concurrent.futures import ThreadPoolExecutor

    submit, call_soon = ThreadPoolExecutor.submit, BaseEventLoop.call_soon_threadsafe

    def followed(function: Callable[..., Any], *, task: bool) -> Callable[..., Any]:
        window = _window.get()

        def call(*arguments: Any, **named: Any) -> Any:
            with recorder.within(window, task=task):
                return function(*arguments, **named)

        return call if window else function

    def submit_followed(pool: ThreadPoolExecutor, function: Any, /, *arguments: Any, **named: Any) -> Any:
        return submit(pool, followed(function, task=False), *arguments, **named)

    def call_soon_followed(loop: BaseEventLoop, callback: Any, *arguments: Any, context: Any = None) -> Any:
        return call_soon(loop, followed(callback, task=True), *arguments, context=context)

    ThreadPoolExecutor.submit, BaseEventLoop.call_soon_threadsafe = submit_followed, call_soon_followed


if FOLDER in os.environ:
    install(Recorder(Path(os.environ[FOLDER]), tuple(os.environ[PACKAGES].split(os.pathsep))))
