"""The tokens of a trajectory as one typed array, a record of 16 bytes a token, and what else is known of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import total_ordering
from types import MappingProxyType
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

NumberT = TypeVar("NumberT", int, float)

TOKEN = np.dtype(
    [
        ("token_ids", np.int32),
        ("rollout_log_probs", np.float32),
        ("weight_version", np.int32),
        ("turn", np.int16),
        ("response_mask", np.uint8),
        ("loss_mask", np.uint8),
    ]
)
"""What every token has. A trajectory may have further columns of any type and width, from an engine's answers."""
COLUMNS = ("token_ids", "response_mask", "loss_mask", "rollout_log_probs", "weight_version", "turn")
"""Of `TOKEN`, in the order of records."""
PACKED = np.dtype(
    [
        ("token_ids", np.int32),
        ("rollout_log_probs", np.float32),
        ("weight_version", np.int32),
        ("response_mask", np.bool_),
        ("loss_mask", np.bool_),
        ("current", np.bool_),
    ]
)
"""What the ranks that train on a token get of it, with further columns. rollout_log_probs: nats; current: sampled by
the trainer's current weights, so that the trainer's log-prob must agree."""
BY_TURN = (("turn", np.int16), ("group", np.int32), ("advantages", np.float32))
"""Further columns of packed tokens, where the loss needs to know turns: the turn, the number of the group in the step,
and the advantage of the token."""
_USUAL = {*(TOKEN.names or ()), *(PACKED.names or ()), *(name for name, _ in BY_TURN)}
NO_COLUMNS: Mapping[str, NDArray[Any]] = MappingProxyType({})
ROUTER_CHOICES = "router_choices"
"""A further column, of a mixture of experts: the experts that the engine sent a token to, `[T, layers, choices]`.

uint8, or uint16 above 256 experts. See `recorded`."""


def records(length: int, more: Mapping[str, NDArray[Any]] = NO_COLUMNS, **columns: ArrayLike) -> NDArray[np.void]:
    """`length` tokens, with columns of `TOKEN` as named, and 0 elsewhere. more: further columns, `[length, ...]`.

    Raises ValueError for a column of another length, and for a further one with the name of a usual one.
    """
    if taken := _USUAL & more.keys():
        raise ValueError(f"a further column of tokens is named {min(taken)}, which is taken: give it another name")
    further = [(name, values.dtype, values.shape[1:]) for name, values in more.items()]
    made = np.zeros(length, np.dtype([*TOKEN.descr, *further]))
    for name, values in {**columns, **more}.items():
        made[name] = values
    return made


def joined(parts: Sequence[NDArray[np.void]], kind: np.dtype[np.void] | None = None) -> NDArray[np.void]:
    """Tokens one after another; a column that one of them lacks is 0 there. kind: their `common_type`.

    Raises ValueError for columns of one name that differ in type or width.
    """
    kind = kind or common_type(part.dtype for part in parts)
    if all(part.dtype == kind for part in parts):
        return np.concatenate(parts)
    made, start = np.zeros(sum(map(len, parts)), kind), 0
    for part in parts:
        for name in part.dtype.names or ():
            made[name][start : start + len(part)] = part[name]
        start += len(part)
    return made


def common_type(kinds: Iterable[np.dtype[np.void]]) -> np.dtype[np.void]:
    """Return a type with the columns of all. Raises ValueError for columns of one name that differ in type or width."""
    kinds = list(dict.fromkeys(kinds))
    if len(kinds) == 1:
        return kinds[0]
    columns: dict[str, tuple[Any, ...]] = {}
    for column in (column for kind in kinds for column in kind.descr):
        if columns.setdefault(column[0], column) != column:
            one, other = columns[column[0]][1:], column[1:]
            raise ValueError(f"the column {column[0]} is {one} in one trajectory, {other} in another")
    return np.dtype(list(columns.values()))


def further(tokens: NDArray[np.void]) -> dict[str, NDArray[Any]]:
    """Return the columns that only some trajectories have, `[T, ...]` each."""
    return {name: tokens[name] for name in tokens.dtype.names or () if name not in _USUAL}


def recorded(choices: NDArray[Any]) -> NDArray[np.bool_]:
    """`[T]`: of which tokens the experts are known, from `ROUTER_CHOICES` `[T, layers, choices >= 2]`.

    A token goes to different experts, so two equal ones, such as the zeros of a token without a record, are none.
    """
    known: NDArray[np.bool_] = choices[:, 0, 0] != choices[:, 0, 1]
    return known


def filled(tokens: NDArray[np.void], start: int, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.void]:
    """Return a copy with further columns `[n, ...]` of the tokens from `start` on; a new column is 0 elsewhere.

    Raises ValueError as `records` and `joined`, and for rows beyond the tokens.
    """
    made = joined([tokens], common_type([tokens.dtype, records(0, {n: v[:0] for n, v in columns.items()}).dtype]))
    for name, values in columns.items():
        if start + len(values) > len(made):
            raise ValueError(f"{len(values)} of {name} from token {start} on, of {len(made)} tokens")
        made[name][start : start + len(values)] = values
    return made


@total_ordering
class Column(Sequence[NumberT]):
    """A column of numbers `[T]` that reads like a list: items and slices are Python's; it cannot be changed."""

    __slots__ = ("_values",)

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: SupportsIndex) -> NumberT: ...
    @overload
    def __getitem__(self, index: slice) -> list[NumberT]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> NumberT | list[NumberT]:
        found: Any = self._values[index].tolist()
        return found  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[NumberT]:
        return iter(self._values.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._values, dtype) if copy else np.asarray(self._values, dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Column, list, tuple)):
            return bool(self._values.tolist() == list(other))
        return NotImplemented

    def __lt__(self, other: Sequence[NumberT]) -> bool:
        return bool(list(self) < list(other))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[NumberT]) -> list[NumberT]:
        return list(self) + list(other)

    def __radd__(self, other: Sequence[NumberT]) -> list[NumberT]:
        return list(other) + list(self)

    def copy(self) -> list[NumberT]:
        """Return the numbers as a list."""
        return list(self)

    def __repr__(self) -> str:
        return repr(self._values.tolist())
