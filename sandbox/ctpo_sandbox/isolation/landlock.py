"""Landlock through raw system calls (no Python binding is packaged): which paths a child may read or write."""

import ctypes
import os
import struct
from functools import partial

from ctpo_sandbox.isolation.libc import Step, check
from ctpo_sandbox.isolation.readable import readable_files, readable_trees

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_MAKE_CHAR, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
_TRUNCATE = 1 << 14
_NET_ALL = 0b11
_SCOPE_ALL = 0b11
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}

_OF_THE_MACHINE = ("/proc/cpuinfo", "/proc/meminfo", "/proc/loadavg")
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, number: int, *arguments: object) -> int:
    return check(_libc.syscall(number, *arguments), name)


class FileRules:
    """Read access: the interpreter, its libraries, the system's and a few device files; nothing else can be opened.

    Landlock checks none of the calls that open nothing: a path that a run knows can be asked for existence, size, dates
    and the text of a link.

    Holds open descriptors of the readable paths. abi: the kernel's version of Landlock. Raises OSError where the kernel
    has none, or a container refuses it.
    """

    def __init__(self) -> None:
        version = (None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
        self.abi = _call("landlock_create_ruleset", _CREATE_RULESET, *version)
        self._handled = (1 << _RIGHTS_BY_ABI.get(self.abi, 16)) - 1
        self._rules = [(self._open(path), _EXECUTE | _READ_FILE | _READ_DIR) for path in readable_trees()]
        files = [*readable_files(), *filter(os.path.exists, _OF_THE_MACHINE)]
        self._rules += [(self._open(path), _READ_FILE) for path in files]
        self._rules.append((self._open("/dev/null"), _READ_FILE | _WRITE_FILE | _TRUNCATE & self._handled))

    @staticmethod
    def _open(path: str) -> int:
        return os.open(path, os.O_PATH | os.O_CLOEXEC)

    def ruleset(self, directory: str) -> int:
        """Descriptor of rules that also allow writing to `directory`, including later mounts below it."""
        attributes = struct.pack("=QQQ", self._handled, _NET_ALL, _SCOPE_ALL)
        size = 24 if self.abi >= 6 else 16 if self.abi >= 4 else 8
        ruleset = _call("landlock_create_ruleset", _CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
        special = _EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_FIFO | _MAKE_BLOCK
        own = self._open(directory)
        for descriptor, rights in [*self._rules, (own, self._handled & ~special)]:
            rule = struct.pack("=Qi", rights, descriptor)
            _call("landlock_add_rule", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0)
        os.close(own)
        return ruleset


def enforcing(ruleset: int) -> Step:
    """Return the step that confines the process to a `FileRules.ruleset`, irreversibly; fails without no_new_privs."""
    return partial(_libc.syscall, _RESTRICT_SELF, ruleset, 0)
