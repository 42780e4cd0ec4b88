"""The seccomp filters as the kernel reads them, over every flag instead of examples. No process loads them here."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import signal
import struct

import pyseccomp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctpo_sandbox.isolation.filters import ANY_PID, compiled
from ctpo_sandbox.isolation.syscalls import (
    CLOCKS_OF_PROCESSES,
    CLONE_ALLOWED,
    FUTEX_WAITS,
    MESSAGE_FLAGS,
    THREAD_SHARES,
)

_DATA = struct.Struct("=iIQ6Q")  # struct seccomp_data: number, architecture, instruction pointer, arguments
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _AND, _JUMP, _RETURN = 0x20, 0x54, 0x05, 0x06
_TESTS = {0x15: int.__eq__, 0x25: int.__gt__, 0x35: int.__ge__, 0x45: lambda found, operand: found & operand != 0}
_ALLOW, _ERRNO, _ARCHITECTURES = 0x7FFF0000, 0x00050000, {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = "allowed"

pytestmark = pytest.mark.skipif(
    os.uname().machine not in _ARCHITECTURES, reason="an architecture without a number here"
)


@functools.cache
def _filters(file_attributes: bool) -> list[list[tuple[int, int, int, int]]]:
    return [list(_INSTRUCTION.iter_unpack(each.code.raw)) for each in compiled(file_attributes=file_attributes)]


def _run(program: list[tuple[int, int, int, int]], data: bytes) -> int:
    """What the kernel's interpreter returns for a call (Linux, Documentation/networking/filter.rst)."""
    at = accumulator = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == _LOAD:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == _AND:
            accumulator &= operand
        elif code == _JUMP:
            at += operand
        elif code == _RETURN:
            return operand
        else:
            at += if_true if _TESTS[code](accumulator, operand) else if_false


def answer(call: str, *arguments: int, file_attributes: bool = True) -> str | int:
    """ALLOWED, or the error number of a call by a run: of its own filter, which comes first, or of its worker's."""
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call)
    given = [argument & 2**64 - 1 for argument in (*arguments, *[0] * (6 - len(arguments)))]
    data = _DATA.pack(number, _ARCHITECTURES[os.uname().machine], 0, *given)
    refused = [found for program in _filters(file_attributes) if (found := _run(program, data)) != _ALLOW]
    if not refused:
        return ALLOWED
    assert refused[0] & 0xFFFF0000 == _ERRNO
    return refused[0] & 0xFFFF


EVERY = sum(THREAD_SHARES.values())
SET_BY_LIBC = 0x3D0F00  # glibc, for a thread
BITS = [1 << bit for bit in range(32)]
UPPER = [0, 1 << 32, 2**64 - 2**32]


def test_a_thread_shares_everything_and_has_no_other_flag() -> None:
    assert answer("clone", SET_BY_LIBC) == ALLOWED
    harmless = sum(CLONE_ALLOWED.values())
    for upper, one, other in itertools.product(UPPER, [0, *BITS], [0, *BITS]):
        flags = EVERY ^ one ^ other if one != other else EVERY ^ one
        good = flags & EVERY == EVERY and flags & ~harmless == 0
        assert (answer("clone", upper | flags) == ALLOWED) == good, hex(flags)


@settings(max_examples=300)
@given(st.integers(0, 2**64 - 1))
def test_no_set_of_flags_makes_a_process_or_a_thread_with_something_of_its_own(flags: int) -> None:
    good = flags & EVERY == EVERY and flags & 2**32 - 1 & ~sum(CLONE_ALLOWED.values()) == 0
    assert (answer("clone", flags) == ALLOWED) == good


@pytest.mark.parametrize("call", MESSAGE_FLAGS, ids=lambda call: call[0])
def test_messages_have_the_flags_of_the_table_alone(call: tuple[str, int]) -> None:
    name, argument = call
    harmless = sum(MESSAGE_FLAGS[call].values())
    for upper, one, other in itertools.product(UPPER, [0, *BITS], [0, *BITS]):
        flags = one | other
        arguments = [3, 0, 1, 0, 0, 0]
        arguments[argument] = upper | flags
        found = answer(name, *arguments)
        assert (found == ALLOWED) == (flags & ~harmless == 0), hex(flags)
        if flags == 1:  # MSG_OOB
            assert found == errno.EPERM


@pytest.mark.parametrize("call", ["clock_gettime", "clock_getres", "clock_nanosleep"])
def test_clocks_of_other_processes_are_refused(call: str) -> None:
    for clock in range(12):
        assert answer(call, clock) == ALLOWED
    for process, kind in itertools.product([1, 2, 77, 4_194_304, 2**27], range(4)):
        assert answer(call, ~process << 3 | kind) == errno.EPERM
        assert answer(call, (~process << 3 | kind) & 2**32 - 1) == errno.EPERM
        assert answer(call, ~process << 3 | kind | 4) == ALLOWED  # of a thread: the kernel answers for one's own only
    assert CLOCKS_OF_PROCESSES == (0x80000004, 0x80000000)


def test_a_futex_is_of_the_process_alone() -> None:
    for upper, command, realtime in itertools.product(UPPER, range(128), (0, 256)):
        assert answer("futex", 0, upper | command | realtime | 128) == ALLOWED
        refused = answer("futex", 0, upper | command | realtime)
        assert refused == (errno.EAGAIN if command in FUTEX_WAITS else errno.EPERM if command < 14 else errno.ENOSYS)
    for call in ("futex_waitv", "futex_wait", "futex_wake", "futex_requeue", "get_robust_list"):
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call) != -1:
            assert answer(call, 0, 0, 0, 128) == errno.ENOSYS
    assert answer("set_robust_list", 0, 24) == 0  # answered, and not carried out


def test_locks_are_granted_or_refused_by_the_filter() -> None:
    allowed = {*range(40), 1025, *range(1030, 1040)}
    refused = {8, 10, 15, 37, 38, 1024, 1026, 1031}
    for command in range(2048):
        wanted = ALLOWED if command in allowed else errno.ENOSYS
        wanted = errno.EPERM if command in refused else wanted
        wanted = 0 if command in (6, 7) else wanted  # record locks
        assert answer("fcntl", 3, command) == wanted


@pytest.mark.parametrize("call", ["kill", "tgkill"])
def test_signals_go_to_oneself_alone_and_are_never_sigkill(call: str) -> None:
    for process in (0, 1, -1, os.getpid(), 2**31):
        assert answer(call, process, signal.SIGTERM, signal.SIGTERM) == errno.EPERM
    for number in range(65):
        at = [ANY_PID, number] if call == "kill" else [ANY_PID, 5, number]
        assert (answer(call, *at) == ALLOWED) == (number != signal.SIGKILL)


@pytest.mark.parametrize("call", ["chmod", "fchmod", "chown", "utimensat", "truncate"])
def test_attributes_of_files_are_refused_where_others_have_the_same_user(call: str) -> None:
    assert answer(call, 0, 0, file_attributes=True) == ALLOWED
    assert answer(call, 0, 0, file_attributes=False) == errno.EPERM


NEW_PROCESSES = ["fork", "vfork", "clone3", "execve", "execveat", "unshare", "setns", "ptrace", "pidfd_open"]


@pytest.mark.parametrize("call", [*NEW_PROCESSES, "socket", "sendmsg", "sendmmsg", "recvmmsg", "io_uring_setup", "bpf"])
def test_calls_that_no_argument_makes_harmless(call: str) -> None:
    for flags in [0, *BITS]:
        assert answer(call, flags, flags, flags) in (errno.EPERM, errno.ENOSYS)
