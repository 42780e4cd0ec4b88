"""The worker side of RewardPool: creates the reward functions and calls them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import io
import json
import operator
import os
import re
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.extensions import activate, is_async, make, shown
from ctpo_megatron.base.stop import ENDING
from ctpo_megatron.base.text import printable
from ctpo_megatron.data.records import NoVerdict, Unreachable
from ctpo_megatron.rewards.fork_server import end_with_trainer
from ctpo_megatron.rewards.protocol import RESERVED, WORDS, Reward

if TYPE_CHECKING:
    from ctpo_megatron.data.records import Prompt
    from ctpo_megatron.data.trajectory import Trajectory

Pair = tuple["Trajectory", "Prompt"]
Routes = Mapping[str | None, tuple[str, Mapping[str, Any]]]
"""Data source -> name and arguments of its reward function; None: all other sources."""


Scored = Reward | NoVerdict

_CLIENT_ERRORS = {"httpx": "HTTPError", "aiohttp": "ClientError"}
"""Module (already imported if its error was raised) -> the errors of its requests. Other clients raise OSError."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_LARGEST = 3.4e38
"""Of float32, which advantages are in; a sum of such figures is finite in float64."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a reward function that decide how the caller submits work."""

    is_async: bool
    text_only: bool


_setup: tuple[Routes, Sequence[str]] = {}, ()
"""Routes and search path of this worker process: tasks have no other access to them."""


@functools.cache
def _functions() -> dict[str | None, Callable[..., Any]]:
    """Created once, even if several sources name the same function; raises what a user's module or class raises."""
    routes, search_path = _setup
    activate(search_path)
    made: dict[str, Callable[..., Any]] = {}
    for name, arguments in routes.values():
        key = json.dumps([name, arguments])
        if key not in made:
            made[key] = make(WORDS.get(name, name), arguments)
    return {source: made[json.dumps([*route])] for source, route in routes.items()}


@functools.cache
def _runner() -> asyncio.Runner:
    """The one event loop of this process: users' objects may keep its connections."""
    return asyncio.Runner()


def start(routes: Routes, search_path: Sequence[str], log_path: Path | None) -> None:
    """Create the reward functions, so that the first trajectory does not have to wait for it.

    log_path: receives what they print.
    """
    global _setup
    # Needed here as well: an already running fork server does not pass on the blocked signals.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    end_with_trainer()
    _setup = routes, search_path
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if isinstance(sys.stdout, io.TextIOWrapper):  # a worker is killed in the end, with what it holds back
            sys.stdout.reconfigure(line_buffering=True)
    with contextlib.suppress(Exception):  # the first task raises it again, for its caller
        _functions()


def traits() -> dict[str | None, Traits]:
    """Return the traits of every route. Raises what creating the functions raised."""
    return {source: _traits(function) for source, function in _functions().items()}


def score(route: str | None, pairs: Sequence[Pair], timeout_s: float) -> list[Scored]:
    """Return one outcome per pair. Several are awaited together, each for at most `timeout_s`; one has no limit."""
    function = _functions()[route]
    if len(pairs) == 1:
        return [_called(function, *pairs[0])]
    return _runner().run(_await_all(function, pairs, timeout_s))


def _traits(function: Callable[..., Any]) -> Traits:
    inner = function.func if isinstance(function, functools.partial) else function
    return Traits(is_async(function), bool(getattr(inner, "text_only", False)))


def _called(function: Callable[..., Any], trajectory: Trajectory, prompt: Prompt) -> Scored:
    try:
        result = function(trajectory, prompt)
        if inspect.isawaitable(result):
            return _runner().run(_awaited(result))
        return _scored(result)
    except BaseException as error:  # this process ignores signals, so a KeyboardInterrupt is the function's own
        return _failed(error)


async def _await_all(function: Callable[..., Any], pairs: Sequence[Pair], timeout_s: float) -> list[Scored]:
    tasks = [asyncio.ensure_future(_awaited_call(function, *pair)) for pair in pairs]
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    outcomes = [late_after(timeout_s) if task in late else task.result() for task in tasks]
    for task in late:
        task.cancel()
    await asyncio.sleep(0)  # let cancelled calls end before the next task of this worker
    return outcomes


async def _awaited_call(function: Callable[..., Any], trajectory: Trajectory, prompt: Prompt) -> Scored:
    try:
        result = function(trajectory, prompt)
    except BaseException as error:
        return _failed(error)
    return await _awaited(result)


async def _awaited(result: Awaitable[Any]) -> Scored:
    try:
        return _scored(await result)
    except BaseException as error:  # not left to the event loop, which a KeyboardInterrupt or SystemExit would stop
        return _failed(error)


def raised(error: str) -> NoVerdict:
    """No verdict, because the function raised this."""
    return NoVerdict("exception", f"the scorer failed ({error})")


def _failed(error: BaseException) -> NoVerdict:
    reason = raised(_described(error)).reason
    return (Unreachable if any(map(_is_of_a_connection, _causes(error))) else NoVerdict)("exception", reason)


def late_after(timeout_s: float) -> NoVerdict:
    """No verdict within this time."""
    return NoVerdict("timeout", f"the scorer was killed after {timeout_s:g} s")


def _scored(result: Any) -> Scored:
    """The result as plain Python numbers and names.

    Raises TypeError or ValueError for what is neither a number nor None, and for names that cannot be metrics.
    """
    found = result if isinstance(result, Reward) else Reward(result)
    given = () if found.turns is None else tuple(found.turns)
    if None in given:
        return NoVerdict("none", f"the scorer returned None for turn {given.index(None) + 1}")
    if found.value is None:
        return NoVerdict("none", "the scorer returned None")
    value = float(found.value)
    _check_names([*found.components, *found.metrics])
    components = {name: float(part) for name, part in found.components.items()}
    metrics = {name: bool(part) if _is_flag(part) else float(part) for name, part in found.metrics.items()}
    turns = {f"turn {number}": float(turn) for number, turn in enumerate(given, start=1) if turn is not None}
    for name, figure in (*turns.items(), ("", value), *components.items(), *metrics.items()):
        if not abs(figure) <= _LARGEST:
            return NoVerdict("not_finite", f"the scorer returned {name}{'=' * bool(name)}{figure}")
    return Reward(value, components, metrics, None if found.turns is None else [*turns.values()])


def _check_names(names: Sequence[str]) -> None:
    """Raises ValueError for a name that must not reach the metrics file."""
    for name in names:
        if type(name) is not str or name in RESERVED or names.count(name) > 1 or not _NAME.fullmatch(name):
            raise ValueError(
                f"a component or metric is named {name!r}. Names must be unique, of letters, digits, `_`, `.` and `-`, "
                f"and none of {', '.join(sorted(RESERVED))}"
            )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"


def _described(error: BaseException) -> str:
    """The error, the address that it was about and the line that raised it, as text: not every one can be pickled."""
    frames = traceback.extract_tb(error.__traceback__)
    text = shown(error)
    address = next(filter(None, map(_address, _causes(error))), "")
    about = f" ({printable(address)})" if address and address not in text else ""
    return f"{text}{about} at {frames[-1].filename}:{frames[-1].lineno}" if frames else f"{text}{about}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from: a client of an API raises its own from an HTTP error."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__


def _is_of_a_connection(error: BaseException) -> bool:
    clients = (getattr(sys.modules.get(module), name, ()) for module, name in _CLIENT_ERRORS.items())
    if isinstance(error, tuple(clients)):
        return True
    file = isinstance(error, OSError) and error.errno is not None and error.filename is not None
    return isinstance(error, OSError) and not file


def _address(error: BaseException) -> str:
    """The URL of the request that failed, or ""."""
    for path in ("request.url", "request_info.real_url", "url"):
        with contextlib.suppress(BaseException):  # of a user's class, or of httpx where no request was made
            if "://" in (url := str(operator.attrgetter(path)(error))):
                return url
    return ""
