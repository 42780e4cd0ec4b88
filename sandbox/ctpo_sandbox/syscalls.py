"""The seccomp filter of a child: one process, no sockets, no reach into other processes or the kernel's settings."""

import errno
from collections.abc import Iterator

import pyseccomp

_CLONE_THREAD = 0x10000
_INT = 0xFFFFFFFF
_SYSCALL_UNKNOWN = -1
_AF_UNIX = 1
_SOCK_DGRAM, _SOCK_RAW = 2, 3
_SOCK_TYPE_MASK = 0xF
_PR_SET_PDEATHSIG = 1
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902

_REFUSED = {
    "new processes": "fork vfork execve execveat",
    "network": "socket bind connect listen accept accept4",
    "other processes": (
        "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_open pidfd_getfd "
        "pidfd_send_signal tkill rt_sigqueueinfo rt_tgsigqueueinfo migrate_pages move_pages"
    ),
    "shared memory outside the address space limit": (
        "memfd_create memfd_secret shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv "
        "msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr"
    ),
    "locks on files of others": "flock",
    "raising limits": "setrlimit",
    "namespaces and mounts": (
        "unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick "
        "mount_setattr swapon swapoff"
    ),
    "kernel interfaces": (
        "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key "
        "init_module finit_module delete_module kexec_load kexec_file_load reboot acct quotactl iopl ioperm "
        "settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname syslog vhangup nfsservctl "
        "lookup_dcookie fanotify_init fanotify_mark open_by_handle_at name_to_handle_at personality mknod mknodat"
    ),
}


def _equals(argument: int, value: int, mask: int = _INT) -> pyseccomp.Arg:
    """The kernel ignores the upper half of an int argument, so must the comparison."""
    return pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, mask, value)


def _conditional() -> Iterator[tuple[str, pyseccomp.Arg]]:
    yield "clone", _equals(0, 0, mask=_CLONE_THREAD)
    yield "prctl", _equals(0, _PR_SET_PDEATHSIG)
    yield "prlimit64", pyseccomp.Arg(2, pyseccomp.NE, 0)
    yield "socketpair", pyseccomp.Arg(0, pyseccomp.NE, _AF_UNIX)
    for kind in (_SOCK_DGRAM, _SOCK_RAW):
        yield "socketpair", _equals(1, kind, mask=_SOCK_TYPE_MASK)
    for command in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX):
        yield "fcntl", _equals(1, command)
    for request in (_FIOSETOWN, _SIOCSPGRP):
        yield "ioctl", _equals(1, request)


class SnippetFilter:
    """The filter of one worker's children. `unknown` names system calls that this libseccomp cannot filter."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self._filter = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        refused = pyseccomp.ERRNO(errno.EPERM)
        for name in " ".join(_REFUSED.values()).split():
            if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) == _SYSCALL_UNKNOWN:
                self.unknown.append(name)
            else:
                self._filter.add_rule(refused, name)
        for name, condition in _conditional():
            self._filter.add_rule(refused, name, condition)
        # glibc falls back to clone, whose flags the filter can read.
        self._filter.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")

    def load(self, pid: int) -> None:
        """Confine the calling process, whose id is `pid`, for good. Raises OSError."""
        for name in ("kill", "tgkill"):
            own = pyseccomp.Arg(0, pyseccomp.NE, pid)
            self._filter.add_rule(pyseccomp.ERRNO(errno.EPERM), name, own)
        self._filter.load()
