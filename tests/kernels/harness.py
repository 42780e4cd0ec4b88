"""What Triton's interpreter does not show by itself: races, accesses outside of the arguments, order of programs.

`observed` runs the programs of every launch in a shuffled order, records each load and store, and compares them when
the launch is over. A device runs programs side by side in any order: two that touch one address, one of them writing,
race there even if the interpreter's result is right.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

LARGEST_GAPPED = 1 << 22
"""Bytes of a tensor with gaps that are looked at one by one; all of a larger one counts as its own."""


@dataclass
class Accesses:
    """Loads and stores of one launch: program, bytes an element, whether it stores, addresses."""

    programs: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    stores: list[bool] = field(default_factory=list)
    addresses: list[np.ndarray] = field(default_factory=list)

    def note(self, program: int, pointers: Any, mask: Any, *, store: bool) -> None:
        live = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        chosen = pointers.data[live].astype(np.int64).ravel()
        if chosen.size:
            self.programs.append(program)
            self.sizes.append(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
            self.stores.append(store)
            self.addresses.append(chosen)

    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Address, size, program, store flag of every single element."""
        counts = [part.size for part in self.addresses]
        columns = (np.array(values).repeat(counts) for values in (self.sizes, self.programs, self.stores))
        return np.concatenate(self.addresses), *columns


@dataclass
class Observer:
    """Takes the place of four methods of the interpreter's builder and of the start of a launch."""

    builder: Any
    shuffle: np.random.Generator
    accesses: Accesses | None = None
    program: int = 0
    order: np.ndarray = field(default_factory=lambda: np.arange(1))

    def set_grid_dim(self, *grid: int) -> None:
        self.order = self.shuffle.permutation(math.prod(grid))
        type(self.builder).set_grid_dim(self.builder, *grid)

    def set_grid_idx(self, *index: int) -> None:
        grid = self.builder.grid_dim
        self.program = int(self.order[np.ravel_multi_index(index, grid)])
        type(self.builder).set_grid_idx(self.builder, *map(int, np.unravel_index(self.program, grid)))

    def load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
        if self.accesses is not None:
            self.accesses.note(self.program, pointers, mask, store=False)
        return type(self.builder).create_masked_load(self.builder, pointers, mask, *rest)

    def store(self, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if self.accesses is not None:
            self.accesses.note(self.program, pointers, mask, store=True)
        return type(self.builder).create_masked_store(self.builder, pointers, value, mask, *rest)

    @contextlib.contextmanager
    def launch(self, name: str, tensors: list[torch.Tensor]) -> Iterator[None]:
        """Raises AssertionError after a launch whose programs race or leave their arguments."""
        self.accesses = accesses = Accesses()
        try:
            yield
        finally:
            self.accesses = None
        problems = _problems(accesses, tensors) if accesses.addresses else []
        assert not problems, f"{name}: {'; '.join(problems)}"


def _problems(accesses: Accesses, tensors: list[torch.Tensor]) -> list[str]:
    address, size, program, store = accesses.flat()
    return [*_outside(address, size, store, tensors), *_races(address, size, program, store)]


def _outside(address: np.ndarray, size: np.ndarray, store: np.ndarray, tensors: list[torch.Tensor]) -> Iterator[str]:
    """Elements that lie in none of the tensors; the gaps between the rows of a slice are nobody's."""
    inside = np.zeros(address.size, bool)
    for tensor in tensors:
        width = tensor.element_size()
        extent = width * (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
        offset = address - tensor.data_ptr()
        hit = (offset >= 0) & (offset + size <= extent) if tensor.numel() else np.zeros(address.size, bool)
        if extent <= LARGEST_GAPPED and not tensor.is_contiguous() and hit.any():
            own = torch.zeros(extent // width, dtype=torch.bool)
            own.as_strided(tensor.shape, tensor.stride()).fill_(True)
            hit[hit] = own.numpy()[offset[hit] // width]
        inside |= hit
    for what, chosen in (("stores", store), ("loads", ~store)):
        if count := int((chosen & ~inside).sum()):
            yield f"{count} {what} outside of the arguments"


def _races(address: np.ndarray, size: np.ndarray, program: np.ndarray, store: np.ndarray) -> Iterator[str]:
    """Bytes that one program stores to and another one stores to or loads."""
    if program.min() == program.max() or not store.any():
        return
    low, high = address[store].min(), (address + size)[store].max()
    near = (address < high) & (address + size > low)  # most loads are of tensors that nobody writes
    unit = int(size[near].min())
    repeats = size[near] // unit
    first = np.repeat(address[near], repeats)
    within = np.arange(first.size) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    where, who, wrote = first + unit * within, np.repeat(program[near], repeats), np.repeat(store[near], repeats)
    written, place = np.unique(where[wrote], return_index=True)
    owner = who[wrote][place]
    at = np.minimum(np.searchsorted(written, where), written.size - 1)
    foreign = (written[at] == where) & (owner[at] != who)
    for what, chosen in (("stored to", wrote), ("loaded", ~wrote)):
        if count := np.unique(where[foreign & chosen]).size:
            yield f"race: {count} places are {what} by one program and stored to by another"


class _NothingToRestore:
    def restore(self) -> None: ...


_NOTHING_TO_RESTORE = _NothingToRestore()


def _no_atomics(*_: Any) -> None:
    raise NotImplementedError("the harness does not record atomic operations: teach it before a kernel uses one")


@contextlib.contextmanager
def observed(seed: int = 0) -> Iterator[None]:
    """Every interpreted launch inside is shuffled and checked. Raises AssertionError at the launch that is wrong."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    from tests.kernels import quick

    observer = Observer(interpreter_builder, np.random.default_rng(seed))
    run, prepare = GridExecutor.__call__, interpreter._patch_lang
    prepared: set[int] = set()

    def call(self: Any, *arguments: Any, **named: Any) -> None:
        tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
        prepared.clear()
        with observer.launch(self.fn.__name__, tensors):
            run(self, *arguments, **named)

    def prepare_once(function: Any) -> Any:
        """Each call of a device function prepares the language anew for its module: two fifths of the time here."""
        if id(function.__globals__) in prepared:
            return _NOTHING_TO_RESTORE
        prepared.add(id(function.__globals__))
        return prepare(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        patch.setattr(interpreter_builder, "set_grid_dim", observer.set_grid_dim, raising=False)
        patch.setattr(interpreter_builder, "set_grid_idx", observer.set_grid_idx, raising=False)
        patch.setattr(interpreter_builder, "create_masked_load", observer.load, raising=False)
        patch.setattr(interpreter_builder, "create_masked_store", observer.store, raising=False)
        for name in ("create_atomic_rmw", "create_atomic_cas"):
            patch.setattr(interpreter_builder, name, _no_atomics)
        patch.setattr(GridExecutor, "__call__", call)
        quick.install(patch)
        yield


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that `torch.empty` and its relatives return holds NaN, or the largest integer: who reads it shows it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
