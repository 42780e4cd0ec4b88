"""The rules of the seccomp filters: what a single-process Python program needs, and nothing else.

Two layers, because loading a long filter takes the kernel most of a millisecond. A worker loads the allow-list once:
other system calls, including future ones, do not exist (ENOSYS) for it and its children. Calls that
programs make deliberately are refused with EPERM, which Python reports as PermissionError. Each child adds a short
filter that refuses calls that only its worker needs.
"""

import errno
import itertools
import os
import signal
from collections.abc import Iterator

import pyseccomp

from ctpo_sandbox.isolation.filters import ANY_PID, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP

_ALLOWED = {
    "files": (
        "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close "
        "lseek stat fstat lstat newfstatat statx access faccessat faccessat2 dup dup2 dup3 "
        "ftruncate truncate fallocate fsync fdatasync sync_file_range fadvise64 readahead sendfile splice tee vmsplice "
        "copy_file_range getdents getdents64 getcwd chdir fchdir rename renameat renameat2 mkdir mkdirat rmdir unlink "
        "unlinkat link linkat symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2 chown fchown "
        "lchown fchownat umask utime utimes utimensat futimesat statfs fstatfs getxattr lgetxattr fgetxattr listxattr "
        "llistxattr flistxattr"
    ),
    "waiting": (
        "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd "
        "eventfd2 timerfd_create timerfd_settime timerfd_gettime signalfd signalfd4 pipe pipe2 pause nanosleep "
        "clock_nanosleep wait4 waitid restart_syscall membarrier rseq"
    ),
    "unix pairs": "shutdown getsockname getpeername getsockopt",
    "memory": (
        "brk mmap munmap mremap mprotect madvise msync mincore mlock mlock2 munlock mlockall munlockall "
        "get_mempolicy pkey_alloc pkey_free pkey_mprotect map_shadow_stack"
    ),
    "signals": (
        "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack alarm "
        "setitimer getitimer"
    ),
    "time": "time gettimeofday clock_gettime clock_getres times",
    "the process itself": (
        "getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid "
        "getrusage getrlimit getpriority sched_yield sched_getaffinity sched_getparam sched_getscheduler "
        "sched_get_priority_max sched_get_priority_min sched_getattr uname sysinfo getcpu getrandom arch_prctl "
        "set_tid_address exit exit_group capget riscv_flush_icache riscv_hwprobe"
    ),
}

_WORKER_ONLY = {
    "new processes": "fork vfork execve execveat",
    "ending them": "pidfd_open pidfd_send_signal setsid setpgid",
    "giving up rights": (
        "setrlimit setuid setgid setreuid setregid setresuid setresgid setgroups capset seccomp "
        "landlock_create_ruleset landlock_add_rule landlock_restrict_self"
    ),
    "the work directory": "mount umount2",
}

_FILE_ATTRIBUTES = {
    "owners and modes": "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat",
    "dates": "utime utimes utimensat futimesat",
    "size": "truncate",
}

_REFUSED = {
    "network": "socket bind connect listen accept accept4",
    "other processes": (
        "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp pidfd_getfd tkill "
        "rt_sigqueueinfo rt_tgsigqueueinfo migrate_pages move_pages setpriority sched_setaffinity sched_setparam "
        "sched_setscheduler sched_setattr ioprio_set ioprio_get"
    ),
    "shared memory outside the address space limit": (
        "memfd_create memfd_secret shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv "
        "msgctl mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr"
    ),
    "locks on files of others": "flock",
    "watching what others open": "inotify_init inotify_init1 inotify_add_watch inotify_rm_watch",
    "larger buffers, and descriptors on their way": "setsockopt sendmsg sendmmsg",
    "timers that can send SIGKILL": "timer_create timer_settime timer_gettime timer_getoverrun timer_delete",
    "rights": (
        "setfsuid setfsgid chroot setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr mknod mknodat"
    ),
    "namespaces and mounts": (
        "unshare setns pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr swapon swapoff"
    ),
    "kernel interfaces": (
        "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key "
        "init_module finit_module delete_module kexec_load kexec_file_load reboot acct quotactl iopl ioperm "
        "settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname syslog vhangup "
        "fanotify_init fanotify_mark open_by_handle_at name_to_handle_at personality modify_ldt"
    ),
}

THREAD_SHARES = {
    "CLONE_VM": 0x100,
    "CLONE_FS": 0x200,
    "CLONE_FILES": 0x400,
    "CLONE_SIGHAND": 0x800,
    "CLONE_THREAD": 0x10000,
}
"""Flags of `clone` without which a thread would have something of its own that limits are not checked for."""

CLONE_ALLOWED = {
    **THREAD_SHARES,
    "CLONE_SYSVSEM": 0x40000,
    "CLONE_SETTLS": 0x80000,
    "CLONE_PARENT_SETTID": 0x100000,
    "CLONE_CHILD_CLEARTID": 0x200000,
    "CLONE_DETACHED": 0x400000,
    "CLONE_CHILD_SETTID": 0x1000000,
    "signal at its end": 0xFF,
}
"""What the C library sets for a thread, or a worker for a run; any other flag is refused."""

_MSG_OOB = 0x1
_RECEIVING = {
    "MSG_PEEK": 0x2,
    "MSG_TRUNC": 0x20,
    "MSG_DONTWAIT": 0x40,
    "MSG_WAITALL": 0x100,
    "MSG_NOSIGNAL": 0x4000,
    "MSG_CMSG_CLOEXEC": 0x40000000,
}
MESSAGE_FLAGS = {
    ("sendto", 3): {"MSG_DONTWAIT": 0x40, "MSG_EOR": 0x80, "MSG_NOSIGNAL": 0x4000, "MSG_MORE": 0x8000},
    ("recvfrom", 3): _RECEIVING,
    ("recvmsg", 2): _RECEIVING,
}
"""Call and number of its argument -> the flags that it may have. Out-of-band bytes, for one, need code of their own."""

CLOCKS_OF_PROCESSES = (0x80000004, 0x80000000)
"""Mask and value of the ids of clocks of processes, which anyone may read. Clocks of threads (4) are of one's own."""

_CLOCK_CALLS = "clock_gettime clock_getres clock_nanosleep"
_CLOSE_RANGE_UNSHARE = 2
_INT = 0xFFFFFFFF
_SYSCALL_UNKNOWN = -1
_BINARY_TREE = 2
_AF_UNIX, _SOCK_STREAM, _SOCK_DGRAM, _SOCK_RAW, _SOCK_SEQPACKET, _SOCK_TYPE_MASK = 1, 1, 2, 3, 5, 0xF
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_GET_NAME, _PR_SET_VMA = 1, 4, 15, 16, 0x53564D41
_PRCTL_ALLOWED = (3, _PR_SET_NAME, _PR_GET_NAME, 39, _PR_SET_VMA)  # 3, 39: reading the dumpable and no_new_privs flags
_FCNTL_GRANTED = (6, 7)
"""Record locks (F_SETLK, F_SETLKW) belong to a process, and no other opens its files: the answer is always yes. Asking
the kernel would let other runs see a lock on a library."""

_FCNTL_REFUSED = {
    "locks of an open file": (37, 38),
    "signals, leases and notices": (8, 10, 15, 1024, 1026),
    "size of a pipe": (1031,),
}
_FCNTL_ALLOWED = {*range(40), 1025, *range(1030, 1040)}.difference(_FCNTL_GRANTED, *_FCNTL_REFUSED.values())
_FIONCLEX, _FIOCLEX, _FIONBIO, _FIONREAD, _TCGETS, _TIOCGWINSZ = 0x5450, 0x5451, 0x5421, 0x541B, 0x5401, 0x5413
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902

FUTEX_PRIVATE = 0x80
_FUTEX_COMMAND = 0x7F
FUTEX_WAITS = (0, 9)
"""FUTEX_WAIT and FUTEX_WAIT_BITSET. Without FUTEX_PRIVATE the memory may be a page of a library, which all runs share,
and the kernel wakes a waiter there when a thread ends. So the answer to such a wait is EAGAIN, as if the value had
changed. pthread_join asks for one, and repeats it until the thread has ended."""

FUTEX_REFUSED = (*range(1, 9), *range(10, 14))
"""All that wake, requeue or lock."""

_ALLOW = pyseccomp.ALLOW
_EPERM = pyseccomp.ERRNO(errno.EPERM)
_ENOSYS = pyseccomp.ERRNO(errno.ENOSYS)
_EAGAIN = pyseccomp.ERRNO(errno.EAGAIN)
_NOTHING_TO_DO = pyseccomp.ERRNO(0)


def _equals(argument: int, value: int, mask: int = _INT) -> pyseccomp.Arg:
    """The kernel ignores the upper half of an int argument, so the comparison must, too."""
    return pyseccomp.Arg(argument, pyseccomp.MASKED_EQ, mask, value)


def _conditional() -> Iterator[tuple[int, str, list[pyseccomp.Arg]]]:
    """Rules of both layers that check arguments; a call that matches none of its rules returns ENOSYS."""
    yield _ALLOW, "close_range", [_equals(2, 0, mask=_CLOSE_RANGE_UNSHARE)]
    yield _EPERM, "close_range", [_equals(2, _CLOSE_RANGE_UNSHARE, mask=_CLOSE_RANGE_UNSHARE)]
    for option in _PRCTL_ALLOWED:
        yield _ALLOW, "prctl", [_equals(0, option)]
    for kind in (_SOCK_STREAM, _SOCK_SEQPACKET):
        yield _ALLOW, "socketpair", [_equals(0, _AF_UNIX), _equals(1, kind, mask=_SOCK_TYPE_MASK)]
    for kind in (_SOCK_DGRAM, _SOCK_RAW):
        yield _EPERM, "socketpair", [_equals(1, kind, mask=_SOCK_TYPE_MASK)]
    yield _ALLOW, "futex", [_equals(1, FUTEX_PRIVATE, mask=FUTEX_PRIVATE)]
    for command in FUTEX_WAITS:
        yield _EAGAIN, "futex", [_equals(1, command, mask=FUTEX_PRIVATE | _FUTEX_COMMAND)]
    for command in FUTEX_REFUSED:
        yield _EPERM, "futex", [_equals(1, command, mask=FUTEX_PRIVATE | _FUTEX_COMMAND)]
    # The kernel would wake what waits at an address of this list, and the list is the run's to write.
    yield _NOTHING_TO_DO, "set_robust_list", []
    for command in sorted(_FCNTL_ALLOWED):
        yield _ALLOW, "fcntl", [_equals(1, command)]
    for command in _FCNTL_GRANTED:
        yield _NOTHING_TO_DO, "fcntl", [_equals(1, command)]
    for command in itertools.chain(*_FCNTL_REFUSED.values()):
        yield _EPERM, "fcntl", [_equals(1, command)]
    for (name, argument), flags in MESSAGE_FLAGS.items():
        yield _ALLOW, name, [_equals(argument, 0, mask=_INT & ~sum(flags.values()))]
        yield _EPERM, name, [_equals(argument, _MSG_OOB, mask=_MSG_OOB)]
    # A worker needs other flags than a thread: the children's filter checks more of them.
    yield _ALLOW, "clone", [_equals(0, 0, mask=_INT & ~sum(CLONE_ALLOWED.values()))]
    for request in (_FIOCLEX, _FIONCLEX, _FIONBIO, _FIONREAD, _TCGETS, _TIOCGWINSZ):
        yield _ALLOW, "ioctl", [_equals(1, request)]
    for request in (_FIOSETOWN, _SIOCSPGRP):
        yield _EPERM, "ioctl", [_equals(1, request)]


def _known(names: dict[str, str]) -> Iterator[str]:
    """Names that this libseccomp knows; other calls return ENOSYS, so a missing one is harmless."""
    for name in " ".join(names.values()).split():
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) != _SYSCALL_UNKNOWN:
            yield name


def worker_rules() -> pyseccomp.SyscallFilter:
    """Return the allow-list."""
    rules = pyseccomp.SyscallFilter(_ENOSYS)
    rules.set_attr(pyseccomp.Attr.CTL_OPTIMIZE, _BINARY_TREE)
    for name in _known(_ALLOWED | _WORKER_ONLY):
        rules.add_rule(_ALLOW, name)
    for name in ("prlimit64", "kill", "tgkill"):  # the children's filter checks their arguments
        rules.add_rule(_ALLOW, name)
    for action, name, conditions in _conditional():
        rules.add_rule(action, name, *conditions)
    for option in (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP):
        rules.add_rule(_ALLOW, "prctl", _equals(0, option))
    for name in _known(_REFUSED):
        rules.add_rule(_EPERM, name)
    return rules


def child_rules(*, file_attributes: bool) -> pyseccomp.SyscallFilter:
    """Calls that a child must not make in addition to its worker's restrictions.

    file_attributes: whether it may change owners, modes and dates, and truncate by path. Landlock does not control the
    first three, nor truncation before Linux 6.2, so a child that shares its user with other files must not.
    """
    rules = pyseccomp.SyscallFilter(_ALLOW)
    for name in _known(_WORKER_ONLY):
        rules.add_rule(_EPERM, name)
    if not file_attributes:
        for name in _known(_FILE_ATTRIBUTES):
            rules.add_rule(_EPERM, name)
        for name, flags in (("open", 1), ("openat", 2)):
            rules.add_rule(_EPERM, name, _equals(flags, os.O_TRUNC, mask=os.O_TRUNC | os.O_ACCMODE))
        rules.add_rule(_ENOSYS, "openat2")  # a filter cannot see its flags
    for flag in THREAD_SHARES.values():
        rules.add_rule(_EPERM, "clone", _equals(0, 0, mask=flag))
    mask, of_process = CLOCKS_OF_PROCESSES
    for name in _CLOCK_CALLS.split():
        rules.add_rule(_EPERM, name, _equals(0, of_process, mask=mask))
    rules.add_rule(_EPERM, "prlimit64", pyseccomp.Arg(2, pyseccomp.NE, 0))
    for option in (_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, PR_SET_SECCOMP):
        rules.add_rule(_EPERM, "prctl", _equals(0, option))
    for name, number in (("kill", 1), ("tgkill", 2)):
        rules.add_rule(_EPERM, name, pyseccomp.Arg(0, pyseccomp.NE, ANY_PID))
        # So that SIGKILL of a run always comes from outside.
        rules.add_rule(_EPERM, name, _equals(number, signal.SIGKILL))
    return rules
