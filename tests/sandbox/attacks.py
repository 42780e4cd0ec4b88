"""Snippets that try to get out, to stay, to starve the machine, or to confuse the server.

Each prints GOT THROUGH as its last act if nothing stopped it.
"""

from __future__ import annotations

from dataclasses import dataclass

ESCAPED = "GOT THROUGH"


@dataclass(frozen=True)
class Attack:
    """name: unique. needs: the protection that stops it ("": every level). timeout: it must end in a timeout."""

    name: str
    code: str
    needs: str = ""
    timeout: bool = False


def _attacks(needs: str, cases: dict[str, str], *, timeout: bool = False) -> list[Attack]:
    return [Attack(name, f"{code}\nprint({ESCAPED!r})", needs, timeout) for name, code in cases.items()]


_RAW = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def _system_call(number: int, *arguments: str) -> str:
    """Fails unless the kernel carries it out. A result of 0 or more counts as carried out."""
    return f"{_RAW}assert libc.syscall({', '.join([str(number), *arguments])}) >= 0"


RESOURCES = {
    "one huge object": "x = bytearray(1 << 33)",
    "many objects": "x = []\nwhile True: x.append(bytearray(10**6))",
    "anonymous mapping": "import mmap; m = mmap.mmap(-1, 1 << 33)",
    "endless recursion": "def f(): f()\nf()",
    "recursion in C": "x = []\nfor _ in range(10**5): x = [x]\nprint(repr(x))",
    "nested source": "eval('(' * 10**5 + ')' * 10**5)",
    "decompression bomb": "import zlib; zlib.decompress(zlib.compress(bytes(1 << 24)), bufsize=1 << 33)",
    "flood of output": "import os\nwhile True: os.write(1, b'x' * 10**6)",
    "flood of errors": "import os\nwhile True: os.write(2, b'x' * 10**6)",
    "huge file": "f = open('f', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20)); f.flush()",
    "sparse file": "open('f', 'wb').truncate(1 << 40)",
    "many descriptors": "files = [open('f', 'w') for _ in range(4096)]",
    "more memory by prlimit": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "more files by prlimit": "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (1 << 40, 1 << 40))",
    "locked memory": "import ctypes\nassert ctypes.CDLL(None).mlockall(3) == 0",
}
ENDLESS = {
    "loop": "while True: pass",
    "loop in C": "sum(range(9, 10**11))",
    "power in C": "pow(73, 99855421)",
    "sleep": "import time; time.sleep(100)",
    "catastrophic expression": "import re; re.match('(a+)+$', 'a' * 50 + 'b')",
    "ignored signals": ("import signal\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"),
    "stopping itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "threads that never end": (
        "import threading\nfor _ in range(4): threading.Thread(target=sum, args=[range(10**12)]).start()"
    ),
    "exit handler that never ends": "import atexit, time\natexit.register(time.sleep, 100)\nraise SystemExit",
    "waiting for a lock": "import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waiting on a pipe": "import os\nr, w = os.pipe(); os.read(r, 1)",
}
HOARDS = {
    "many large files": ("import time\nfor i in range(40): open(f'f{i}', 'wb').write(bytes(4 << 20))\ntime.sleep(2)"),
    "very many files": "import time\nfor i in range(10**5): open(f'f{i}', 'w').close()\ntime.sleep(2)",
    "very many directories": "import os, time\nfor i in range(10**5): os.mkdir(f'd{i}')\ntime.sleep(2)",
    "files without a name": (
        "import os, time\nkept = []\nfor i in range(40):\n    kept.append(open('f', 'wb', 0)); os.remove('f')\n"
        "    kept[-1].write(bytes(4 << 20))\ntime.sleep(2)"
    ),
}

# A thread must share files and directory with the others, and must be in no namespace of its own. Without CLONE_SIGHAND
# the kernel starts no thread (EINVAL), so what passes the filter does no harm.
_CLONES = f"""{_RAW}
import itertools
shared, others = (0x200, 0x400, 0x10000), (0, 0x2000, 0x4000, 0x8000, 0x20000, *(1 << bit for bit in range(25, 31)))
got_through = []
for kept, other in itertools.product(itertools.product((0, 1), repeat=3), others):
    flags = sum(flag for flag, keep in zip(shared, kept) if keep) | other
    if flags != sum(shared) and (libc.syscall(56, flags, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38)):
        got_through.append(hex(flags))
assert got_through"""

PROCESSES = {
    "fork": "import os\nif os.fork() == 0: os._exit(0)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "forkpty": "import pty; pty.fork()",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "subprocess": "import subprocess; subprocess.run(['true'], check=True)",
    "daemon": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "system": "import os\nassert os.system('true') == 0",
    "multiprocessing": "import multiprocessing as m\np = m.get_context('fork').Process(target=print); p.start()",
    "clone by number": _system_call(56, "17", "0", "0", "0", "0"),
    "clone, upper half set": f"{_RAW}assert libc.syscall(56, ctypes.c_uint64(1 << 32 | 17), 0, 0, 0, 0) >= 0",
    "clone3": f"{_RAW}a = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)\nassert libc.syscall(435, a, 88) >= 0",
    "vfork by number": _system_call(58),
    "new session": "import os; os.setsid()",
    "a limit of its own": "import resource as r; r.setrlimit(r.RLIMIT_CORE, (0, 0))",
    "clone with every set of flags": _CLONES,
    "a table of descriptors by close_range": _system_call(436, "900", "901", "2"),
}

SIGNALS = {
    "kill the parent": "import os; os.kill(os.getppid(), 9)",
    "kill everything": "import os; os.kill(-1, 9)",
    "kill the group": "import os; os.kill(0, 15)",
    "kill process 1": "import os; os.kill(1, 9)",
    "stop the parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "thread of another": _system_call(234, "__import__('os').getppid()", "__import__('os').getppid()", "9"),
    "queued signal": _system_call(129, "__import__('os').getppid()", "10", "(ctypes.c_char * 128)()"),
    "process handle": "import os; os.pidfd_open(os.getppid())",
    "signal by owner of a file": "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "trace the parent": f"{_RAW}import os\nassert libc.ptrace(16, os.getppid(), 0, 0) == 0",
    "read the parent's memory": _system_call(310, "__import__('os').getppid()", "0", "0", "0", "0", "0"),
    "limits of the parent": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))",
    "priority of the parent": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "cores of the parent": "import os; os.sched_setaffinity(os.getppid(), {0})",
    "survive the parent": _system_call(157, "1", "0"),
    "survive the parent, upper half set": _system_call(157, "ctypes.c_uint64(1 << 32 | 1)", "0"),
    "signal of a file, upper half set": _system_call(72, "0", "ctypes.c_uint64(1 << 32 | 10)", "9"),
}

NETWORK = {
    "stream socket": "import socket; socket.socket()",
    "datagram socket": "import socket; socket.socket(type=socket.SOCK_DGRAM)",
    "raw socket": "import socket; socket.socket(type=socket.SOCK_RAW)",
    "version 6": "import socket; socket.socket(socket.AF_INET6)",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "packet socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "vsock": "import socket; socket.socket(40)",
    "kernel cryptography": "import socket; socket.socket(38, socket.SOCK_SEQPACKET)",
    "bluetooth": "import socket; socket.socket(31, socket.SOCK_RAW)",
    "datagram pair": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "connection": "import socket; socket.create_connection(('127.0.0.1', 80))",
    "web": "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
    "name lookup": "import socket; socket.getaddrinfo('example.com', 80)",
    "server": "import socket; socket.create_server(('', 0))",
    "event loop server": (
        "import asyncio\nasync def f(): assert (await asyncio.start_server(print, '127.0.0.1', 0)).sockets\n"
        "asyncio.run(f())"
    ),
    "socket by number, upper half set": _system_call(41, "ctypes.c_uint64(1 << 32 | 2)", "1", "0"),
    "pair of sockets, upper half set": _system_call(53, "ctypes.c_uint64(1 << 32 | 2)", "1", "0", "0"),
}

READS = {
    "password file": "open('/etc/passwd').read()",
    "shadow file": "open('/etc/shadow').read()",
    "environment of process 1": "open('/proc/1/environ').read()",
    "environment of the parent": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "memory of the parent": "import os; open(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
    "symbolic link out": "import os; os.symlink('/etc', 'e'); open('e/passwd').read()",
    "hard link out": "import os; os.link('/etc/passwd', 'p'); open('p').read()",
    "root through proc": "open('/proc/self/root/etc/passwd').read()",
    "the server's directory": "import os, glob; os.listdir(os.path.dirname(glob.glob('/tmp/ctpo-sandbox-*')[0]))",
    "home directory": "import os; os.listdir('/root')",
    "kernel log": "open('/dev/kmsg').read(1)",
    "memory of the machine": "open('/dev/mem', 'rb').read(1)",
    "disk": "import glob; open(sorted(glob.glob('/dev/[snv]*[a0-9]'))[0], 'rb').read(1)",
}

WRITES = {
    "above its directory": "open('../x', 'w')",
    "system directory": "open('/usr/ctpo-sandbox-test', 'w')",
    "its interpreter": "import os, sys; open(os.path.realpath(sys.executable), 'ab')",
    "removing its interpreter": "import os, sys; os.remove(sys.executable)",
    "a library": "import json; open(json.__file__, 'a')",
    "a new library": "import os, sys; open(os.path.join(sys.prefix, 'lib', 'sitecustomize.py'), 'w')",
    "permissions of a library": "import json, os; os.chmod(json.__file__, 0o777)",
    "dates of a library": "import json, os; os.utime(json.__file__)",
    "truncating a library": "import json, os; os.truncate(json.__file__, 0)",
    "link from outside": "import os; os.symlink(os.getcwd(), '/usr/lib/ctpo-sandbox-test')",
    "shared memory files": "open('/dev/shm/ctpo-sandbox-test', 'w')",
    "device": "import os, stat; os.mknod('d', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'w')",
    "score of the memory killer": "open('/proc/self/oom_score_adj', 'w').write('-1000')",
    "cgroup": "open('/sys/fs/cgroup/cgroup.procs', 'w').write('0')",
}

KERNEL = {
    "bpf": _system_call(321, "0", "0", "0"),
    "performance events": _system_call(298, "(ctypes.c_char * 128)()", "0", "-1", "-1", "0"),
    "user faults": _system_call(323, "1"),
    "ring of requests": _system_call(425, "1", "(ctypes.c_char * 128)()"),
    "keyring": _system_call(250, "0", "-3", "1"),
    "key": _system_call(248, "b'user'", "b'x'", "b'y'", "1", "-3"),
    "new namespaces": _system_call(272, "0x10000000"),
    "entering a namespace": _system_call(308, "0", "0"),
    "mount": _system_call(165, "b'none'", "b'/'", "b'tmpfs'", "0", "0"),
    "new mount interface": _system_call(430, "b'tmpfs'", "0"),
    "another root": "import os; os.chroot('.')",
    "module": _system_call(313, "0", "b''", "0"),
    "restart": _system_call(169, "0xfee1dead", "672274793", "0", "0"),
    "personality": _system_call(135, "0x0040000"),
    "anonymous file": "import os; os.memfd_create('a')",
    "shared memory": _system_call(29, "0", "4096", "0o1600"),
    "semaphores": _system_call(64, "0", "1", "0o1600"),
    "message queue": _system_call(68, "0", "0o1600"),
    "named queue": _system_call(240, "b'ctpo'", "0o102", "0o600", "0"),
    "file handle": _system_call(304, "-100", "(ctypes.c_char * 128)()", "0"),
    "another filter": _system_call(317, "1", "0", "(ctypes.c_char * 16)()"),
    "user": "import os; os.setuid(12345)",
    "groups": "import os; os.setgroups([12345])",
    "capabilities": _system_call(126, "(ctypes.c_char * 8)()", "(ctypes.c_char * 24)()"),
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "host name": "import socket; socket.sethostname('x')",
    "lock on a library": "import fcntl, json; fcntl.flock(open(json.__file__), fcntl.LOCK_EX)",
    "lock of an open file": "import fcntl; fcntl.fcntl(open('f', 'w'), 37, bytes(32))",
    "x32 entry": _system_call(0x40000000 | 39),
    "call of the future": _system_call(900),
    "32-bit entry": (
        "import ctypes, mmap\n"
        "m = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
        "call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "assert call() > 0"
    ),
}

_BUFFER = "(ctypes.c_char * 4096)()"
USR = ("", "/bin", "/share", "/src", "/local")
_WORD = "ctypes.byref(ctypes.c_uint32())"

MORE_SYSTEM_CALLS = {
    name: _system_call(number, *arguments)
    for name, number, *arguments in [
        ("wake-up of another thread", 200, "1", "9"),
        ("queued signal to a thread", 297, "1", "1", "10", _BUFFER),
        ("comparison of processes", 312, "1", "1", "0", "0", "0"),
        ("descriptor of another", 438, "3", "0", "0"),
        ("advice on another's memory", 440, "3", _BUFFER, "1", "4", "0"),
        ("release of another's memory", 448, "3", "0"),
        ("pages of another to another node", 256, "1", "64", _BUFFER, _BUFFER),
        ("pages of another moved", 279, "1", "0", _BUFFER, _BUFFER, _BUFFER, "0"),
        ("its own scheduler", 144, "0", "0", _BUFFER),
        ("its own cores", 203, "0", "8", "ctypes.byref(ctypes.c_ulong(1))"),
        ("its own disk priority", 251, "1", "0", "0"),
        ("a group of processes", 109, "0", "0"),
        ("another file user", 122, "0"),
        ("another file group", 123, "0"),
        ("extended attribute", 188, "b'/usr'", "b'user.x'", "b'y'", "1", "0"),
        ("removal of an extended attribute", 197, "b'/usr'", "b'user.x'"),
        ("another root by its other name", 155, "b'.'", "b'.'"),
        ("a copy of a mount", 428, "-100", "b'/'", "1"),
        ("a mount moved", 429, "-100", "b'/'", "-100", "b'/usr'", "0"),
        ("a mount configured", 431, "3", "6", "0", "0", "0"),
        ("a mount made", 432, "3", "0", "0"),
        ("a mount picked", 433, "-100", "b'/'", "0"),
        ("a mount's flags", 442, "-100", "b'/'", "0", _BUFFER, "32"),
        ("a mount taken away", 166, "b'/proc'", "2"),
        ("swapping on", 167, "b'/f'", "0"),
        ("swapping off", 168, "b'/f'"),
        ("a module from memory", 175, _BUFFER, "4096", "b''"),
        ("a module removed", 176, "b'x'", "0"),
        ("another kernel", 246, "0", "0", "0", "0"),
        ("accounting", 163, "0"),
        ("quotas", 179, "0x800001", "b'/dev/sda1'", "0", _BUFFER),
        ("ports of the machine", 172, "3"),
        ("one port of the machine", 173, "0x80", "1", "1"),
        ("time of day", 164, _BUFFER, "0"),
        ("adjustment of the clock", 159, _BUFFER),
        ("domain name", 171, "b'x'", "1"),
        ("log of the kernel", 103, "3", _BUFFER, "4096"),
        ("end of the terminal", 153),
        ("watching all files", 300, "0", "0"),
        ("handle of a file", 303, "-100", "b'/usr'", _BUFFER, _BUFFER, "0"),
        ("segments of the processor", 154, "1", _BUFFER, "16"),
        ("a key of others", 249, "b'user'", "b'x'", "0", "-3"),
        ("entry into a ring of requests", 426, "3", "1", "0", "0", "0", "0"),
        ("registration with a ring of requests", 427, "3", "0", "0", "0"),
        ("secret memory", 447, "0"),
        ("attaching shared memory", 30, "0", "0", "0"),
        ("removal of a named queue", 241, "b'x'"),
        ("its own filter by prctl", 157, "22", "2", _BUFFER),
        ("being read by others", 157, "4", "1"),
        ("its own memory map", 157, "35", "1", "0", "0", "0"),
        ("secure bits", 157, "28", "0"),
        ("rules for files", 444, _BUFFER, "8", "0"),
        ("its own limits by number", 160, "7", _BUFFER),
        ("a thread in another user namespace", 56, "0x10000000", "0", "0", "0", "0"),
    ]
}

CHANNELS = {
    "watching what others open": _system_call(294, "0"),
    "watching by the old number": _system_call(253),
    "timer that kills": _system_call(222, "0", "0", "ctypes.byref(ctypes.c_int())"),
    "killing itself": "import os; os.kill(os.getpid(), 9)",
    "killing its own thread": _system_call(234, "__import__('os').getpid()", "__import__('os').getpid()", "9"),
    "larger socket buffer": (
        "import socket; a, b = socket.socketpair(); a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)"
    ),
    "descriptors on their way": "import socket; a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])",
    "out-of-band bytes": "import socket; a, b = socket.socketpair(); a.send(b'x', socket.MSG_OOB)",
    "reading out-of-band bytes": "import socket; a, b = socket.socketpair(); b.recv(1, socket.MSG_OOB | 0x40)",
    "errors of a socket": "import socket; a, b = socket.socketpair(); b.recvmsg(1, 0, 0x2000 | 0x40)",
    "clock of the parent": "import os, time; time.clock_gettime(~os.getppid() << 3 | 2)",
    "resolution of the parent's clock": "import os, time; time.clock_getres(~os.getppid() << 3 | 1)",
    "sleeping by the parent's clock": _system_call(
        230, "~__import__('os').getppid() << 3 | 2", "0", "(ctypes.c_long * 2)(0, 1)", "0"
    ),
    "waking by a page of a library": _system_call(202, _WORD, "1", "1"),
    "waking some": _system_call(202, _WORD, "10", "1", "None", "None", "-1"),
    "waking two": _system_call(202, _WORD, "5", "1", "1", _WORD, "0"),
    "counting who waits": _system_call(202, _WORD, "3", "1", "1", _WORD),
    "waking by the new call": _system_call(454, _WORD, "-1", "1", "2"),
    "moving by the new call": _system_call(456, _WORD, "0", "1", "1"),
    "queued real-time signal": (
        f"{_RAW}import os, signal, threading\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
        "assert libc.syscall(234, os.getpid(), threading.get_native_id(), 40) == 0"
    ),
    "larger pipe": "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20)",
    "lease of a file": "import fcntl, json; fcntl.fcntl(open(json.__file__), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "notice of a directory": "import fcntl, os; fcntl.fcntl(os.open('/usr', 0), fcntl.F_NOTIFY, 1)",
    "threads without end": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "for _ in range(3000): threading.Thread(target=time.sleep, args=[9], daemon=True).start()\ntime.sleep(1)"
    ),
}

READ = [
    "/etc/hosts",
    "/etc/hostname",
    "/etc/group",
    "/proc/kcore",
    "/proc/kallsyms",
    "/proc/1/maps",
    "/proc/1/mem",
    "/proc/1/cmdline",
    "/proc/net/tcp",
    "/proc/self/mountinfo",
    "/proc/self/net/unix",
    "/dev/ptmx",
    "/sys/kernel/notes",
    "/proc/sys/kernel/random/boot_id",
]
LISTED = ("/", "/var", "/etc", "/sys/class/net", *(f"/usr{name}" for name in USR))
WRITTEN = [
    "/etc/ctpo-test",
    "/var/tmp/ctpo-test",
    "/lib/ctpo-test",
    "/proc/sysrq-trigger",
    "/proc/1/mem",
    "/proc/1/oom_score_adj",
    "/proc/sys/vm/overcommit_memory",
]
MORE_READS = {
    **{f"reading {path}": f"open({path!r}, 'rb').read(1)" for path in READ},
    **{f"listing {path}": f"import os; os.listdir({path!r})" for path in LISTED},
    "the folder around its packages": "import os, sys; os.listdir(sys.prefix)",
    "the folder around its library": "import os, sys; os.listdir(sys.base_prefix)",
    "programs of its environment": "import os, sys; os.listdir(os.path.join(sys.prefix, 'bin'))",
}
MORE_WRITES = {
    **{f"writing {path}": f"open({path!r}, 'w').write('1')" for path in WRITTEN},
    "renaming a library": "import json, os; os.rename(json.__file__, json.__file__ + 'x')",
    "a library under a name of its own": "import json, os; os.link(json.__file__, 'l'); open('l', 'a')",
    "removing a device": "import os; os.remove('/dev/null')",
    "emptying a library": "import json, os; os.open(json.__file__, os.O_WRONLY | os.O_TRUNC)",
    "size of a library": "import json; open(json.__file__, 'r+').truncate(0)",
}

ATTACKS = [
    *(*_attacks("", RESOURCES), *_attacks("", ENDLESS, timeout=True), *_attacks("disk", HOARDS)),
    *(*_attacks("processes", PROCESSES), *_attacks("signals", SIGNALS), *_attacks("network", NETWORK)),
    *(*_attacks("file reads", READS), *_attacks("file writes", WRITES), *_attacks("processes", KERNEL)),
    *(*_attacks("processes", MORE_SYSTEM_CALLS), *_attacks("processes", CHANNELS)),
    *(*_attacks("file reads", MORE_READS), *_attacks("file writes", MORE_WRITES)),
]

ODDITIES: dict[str, tuple[str, str, str]] = {
    "bytes that are no text": (r"import os; os.write(1, b'\xff\xfe ok')", "success", "\ufffd\ufffd ok"),
    "zero bytes": (r"print('a\0b')", "success", "a\0b\n"),
    "lone surrogate": (r"print('\ud800')", "runtime_error", ""),
    "zero byte in the source": ("print(1)\0", "runtime_error", ""),
    "byte order mark": ("\ufeffprint(1)", "success", "1\n"),
    "empty source": ("", "success", ""),
    "very long line": ("x = '" + "y" * 10**6 + "'; print(len(x))", "success", "1000000\n"),
    "looks like a reply": (
        'print(\'{"status": "success", "run_result": {}}\'); raise SystemExit(1)',
        "runtime_error",
        None,
    ),
    "early exit": ("import os; os._exit(0)", "success", ""),
    "exit code 256": ("raise SystemExit(256)", "success", ""),
    "exit code -1": ("raise SystemExit(-1)", "runtime_error", ""),
    "closed outputs": ("import os\nfor n in (0, 1, 2): os.close(n)\nos._exit(0)", "success", ""),
    "closed stdout": ("import sys; print(1); sys.stdout.close()", "success", "1\n"),
    "outputs exchanged": ("import os; os.dup2(1, 2); os.write(2, b'x')", "success", "x"),
    "truncated output": ("import os; print('abc', flush=True); os.ftruncate(1, 0); print('d')", "success", "d\n"),
    "every other descriptor": (
        "import os\nn = 0\n"
        "for i in range(3, 256):\n    try: os.write(i, b'{}'); n += 1\n    except OSError: pass\nprint(n)",
        "success",
        "0\n",
    ),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", "runtime_error", ""),
    "own death": ("import os; os.kill(os.getpid(), 9)", "runtime_error", ""),
    "broken exception": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "runtime_error", ""),
    "broken hook": ("import sys\nsys.excepthook = None\n1 / 0", "runtime_error", ""),
    "exception in a thread": ("import threading\nthreading.Thread(target=lambda: 1 / 0).start()", "success", ""),
    "recursion caught": ("def f(): f()\ntry: f()\nexcept RecursionError: print('ok')", "success", "ok\n"),
    "memory error caught": ("try: bytearray(1 << 40)\nexcept MemoryError: print('ok')", "success", "ok\n"),
}
"""name -> (code, verdict, stdout or None for any): unusual and harmless; each must get an answer that is right."""

TRACES: dict[str, tuple[str, str]] = {
    "a file": ("open('left', 'w').write('x')", "import os; print(os.listdir())"),
    "a file in /tmp": (
        "try: open('/tmp/ctpo-left', 'w').write('x')\nexcept OSError: pass",
        "import os; print([] if not os.path.exists('/tmp/ctpo-left') else 1)",
    ),
    "a module": ("import math; math.left = 1", "import math; print([] if not hasattr(math, 'left') else 1)"),
    "a builtin": ("import builtins; builtins.left = 1", "print([] if 'left' not in dir(__builtins__) else 1)"),
    "the environment": (
        "import os; os.environ['LEFT'] = '1'",
        "import os; print([] if 'LEFT' not in os.environ else 1)",
    ),
    "the search path": (
        "import sys; sys.path.append('/left')",
        "import sys; print([p for p in sys.path if 'left' in p])",
    ),
    "the file mask": ("import os; os.umask(0o077)", "import os; m = os.umask(0); print([] if m != 0o077 else m)"),
    "a signal handler": (
        "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "import signal; print([] if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL else 1)",
    ),
    "a numpy setting": (
        "import numpy; numpy.set_printoptions(precision=1)",
        "import numpy; print([] if numpy.get_printoptions()['precision'] == 8 else 1)",
    ),
    "a numpy seed": (
        "import numpy; numpy.random.seed(0)",
        "import numpy; x = numpy.random.rand(); print([] if abs(x - 0.5488135) > 1e-6 else x)",
    ),
    "a sympy seed": (
        "import sympy.core.random as r; r.seed(0)",
        "import sympy.core.random as r; x = r.random(); print([] if abs(x - 0.8444218515250481) > 1e-6 else x)",
    ),
    "the recursion limit": (
        "import sys; sys.setrecursionlimit(99999)",
        "import sys; print([] if sys.getrecursionlimit() == 1000 else 1)",
    ),
}
"""name -> (what a run leaves, what a later run prints: `[]` if it sees nothing of it)."""
