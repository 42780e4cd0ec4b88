"""Kernel objects that two runs can both name: what one run does to each (hold), and what another may notice (look).

A program of `hold` appends to `seen` what the kernel carried out although the table says that it is refused; a program
of `look`, what it noticed of the other run. Both are repeated while both runs live. Numbers of calls are of x86-64.
"""

from __future__ import annotations

from dataclasses import dataclass

REFUSED, OWN, SIDE_CHANNEL = "refused", "own", "side channel"
LEVELS = ("A", "B", "C")


@dataclass(frozen=True)
class Row:
    """name: as in the table of docs/sandbox.md. answers: at each of `LEVELS`. start: of both programs."""

    name: str
    answers: tuple[str, ...]
    hold: str
    look: str
    start: str = ""


def _row(name: str, answers: str | tuple[str, ...], hold: str, look: str = "", start: str = "") -> Row:
    """look: the same as `hold` where none is given."""
    return Row(name, (answers,) * len(LEVELS) if isinstance(answers, str) else answers, hold, look or hold, start)


COMMON = """
import ctypes, fcntl, json, mmap, os, signal, socket, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
seen, own = [], (os.getpid(), os.getppid())

def call(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments), ctypes.get_errno()

def carried_out(name, number, *arguments):
    if call(number, *arguments)[0] >= 0:
        seen.append(name)

def attempt(name, function, *arguments):
    try:
        function(*arguments)
    except (OSError, RuntimeError):
        return
    seen.append(name)
"""
HOLD = """
start = time.time()
while time.time() < start + {seconds}:
    hold()
    time.sleep(0.005)
print(json.dumps([start, time.time(), sorted(set(seen))]))
"""
LOOK = """
time.sleep({seconds} / 4)
start = time.time()
while time.time() < start + {seconds} / 4:
    look()
    time.sleep(0.005)
print(json.dumps([start, time.time(), sorted(set(seen))]))
"""


def programs(row: Row, seconds: float) -> tuple[str, str]:
    """Both programs of a row; the first acts for `seconds`, the second looks for a quarter of them."""
    bodies = [("hold", row.hold), ("look", row.look)]
    functions = ["\n    ".join([f"def {name}():", *code.splitlines()]) for name, code in bodies]
    ends = (HOLD.format(seconds=seconds), LOOK.format(seconds=seconds))
    hold, look = ("\n".join([COMMON, row.start, function, end]) for function, end in zip(functions, ends, strict=True))
    return hold, look


_PAGE = """
file = open(json.__file__, "rb")
page = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
value, mine = ctypes.c_uint32.from_address(page).value, ctypes.c_uint32()
at, soon = ctypes.c_void_p(page), (ctypes.c_long * 2)(0, 20_000_000)
left = [45]

def waits(command, *rest):
    result, error = call(202, at, command, value, soon, *rest)
    if result == 0 or error == 110:
        seen.append("waited")
"""
_WAITS = "waits(0)\nwaits(9, None, -1)\nwaits(256 | 9, None, -1)"

ROWS = [
    _row(
        "futexes on library pages",
        REFUSED,
        "for flag in (0, 256):\n    carried_out('wake', 202, at, flag | 1, 1)\n"
        "    carried_out('wake some', 202, at, flag | 10, 1, None, None, -1)\n"
        "    carried_out('wake two', 202, ctypes.byref(mine), flag | 5, 1, 1, at, 0)\n"
        "    carried_out('requeue', 202, at, flag | 3, 1, 1, ctypes.byref(mine), value)\n"
        "    carried_out('compare and requeue', 202, at, flag | 4, 1, 1, ctypes.byref(mine), value)\n"
        "    carried_out('requeue to a lock', 202, at, flag | 12, 1, 1, ctypes.byref(mine), value)\n"
        "for number in (449, 454, 455, 456):\n    carried_out(number, number, at, -1, 1, 2)",
        _WAITS,
        _PAGE,
    ),
    _row(
        "wake-ups at thread exit",
        REFUSED,
        "left[0] -= 1\nif left[0] > 0:\n    threading.Thread(target=call, args=(218, at)).start()\ntime.sleep(0.02)",
        _WAITS,
        _PAGE,
    ),
    _row(
        "threads",
        OWN,
        "while len(kept) < 125:\n    kept.append(threading.Thread(target=time.sleep, args=[5], daemon=True))\n"
        "    kept[-1].start()",
        "try:\n    more = [threading.Thread(target=abs, args=[1]) for _ in range(8)]\n"
        "    for thread in more: thread.start()\n    for thread in more: thread.join()\n"
        "except RuntimeError as error: seen.append(str(error))",
        "kept = []",
    ),
    _row(
        "queued signals",
        REFUSED,
        "for _ in range(100): carried_out('queued', 234, os.getpid(), threading.get_native_id(), 40)",
        start="signal.pthread_sigmask(signal.SIG_BLOCK, [40])",
    ),
    _row("POSIX timers", REFUSED, "carried_out('timer', 222, 0, None, ctypes.byref(timer))",
         start="timer = ctypes.c_int()"),
    _row(
        "System V and POSIX IPC",
        REFUSED,
        "carried_out('memory', 29, 4711, 4096, 0o1666)\ncarried_out('semaphore', 64, 4711, 1, 0o1666)\n"
        "carried_out('queue', 68, 4711, 0o1666)\ncarried_out('named queue', 240, b'x', 0o102, 0o666, None)\n"
        "carried_out('file of memory', 319, b'x', 0)\nattempt('file', open, '/dev/shm/ctpo-shared', 'w')",
    ),
    _row("locked memory", REFUSED, "carried_out('page', 149, place, 4096)\ncarried_out('all', 151, 1)",
         start="place = ctypes.create_string_buffer(8192)"),
    _row("inotify and fanotify", REFUSED, "carried_out('inotify', 294, 0)\ncarried_out('fanotify', 300, 0, 0)"),
    _row(
        "epoll watches",
        (OWN, SIDE_CHANNEL, SIDE_CHANNEL),
        "for one in kept[:40]:\n    poll = select.epoll()\n    for end in kept: poll.register(end)",
        "with select.epoll() as poll:\n"
        "    try: poll.register(kept[0])\n    except OSError as error: seen.append(str(error))",
        "import select\nkept = [end for _ in range(40) for end in os.pipe()]",
    ),
    _row(
        "pipe buffers",
        (OWN, SIDE_CHANNEL, SIDE_CHANNEL),
        "while len(kept) < 100:\n    kept.append(os.pipe())\n    os.write(kept[-1][1], bytes(65536))",
        "ends = os.pipe()\nif fcntl.fcntl(ends[0], 1032) != 65536: seen.append('small')\n"
        "for end in ends: os.close(end)",
        "kept = []",
    ),
    _row("kernel keyrings", REFUSED,
         "carried_out('key', 248, b'user', b'x', b'y', 1, -4)\ncarried_out('ring', 250, 0, -4, 1)"),
    _row("io_uring and AIO", REFUSED,
         "carried_out('aio', 206, 8, ctypes.byref(ring))\ncarried_out('ring', 425, 8, ctypes.byref(options))",
         start="ring, options = ctypes.c_ulong(), ctypes.create_string_buffer(128)"),
    _row(
        "process ids",
        (OWN, OWN, SIDE_CHANNEL),
        "os.getpid()",
        "if not left: return\nleft.clear()\n"
        "for number in range(1, 1 << 15):\n"
        "    if number not in own and os.path.lexists(f'/proc/{number}'): seen.append(number)",
        "left = [1]",
    ),
    _row(
        "process clocks",
        REFUSED,
        "os.getpid()",
        "for number in range(1, 3000):\n    if number != os.getpid():\n"
        "        attempt(number, time.clock_gettime, ~number << 3 | 2)",
    ),
    _row(
        "signals",
        REFUSED,
        "os.getpid()",
        "for number in range(1, 3000):\n    if number != os.getpid():\n        try: os.kill(number, 0)\n"
        "        except PermissionError: continue\n        except OSError: pass\n        seen.append(number)",
    ),
    _row(
        "file locks, leases and notices",
        REFUSED,
        "fcntl.lockf(file, fcntl.LOCK_SH)\nattempt('flock', fcntl.flock, file, fcntl.LOCK_SH)\n"
        "attempt('open file', fcntl.fcntl, file, 37, record)\nattempt('lease', fcntl.fcntl, file, 1024, 0)\n"
        "attempt('notice', fcntl.fcntl, os.open(os.path.dirname(json.__file__), 0), 1026, 1)",
        "if struct.unpack('hhqqi', fcntl.fcntl(file, fcntl.F_GETLK, record))[0] != fcntl.F_UNLCK: seen.append('lock')",
        "import struct\nfile = open(json.__file__)\nrecord = struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 0, 0)",
    ),
    _row(
        "files of a run",
        OWN,
        "open('secret', 'w').close()",
        "for path in ('..', '../..', '/tmp', '/var/tmp', '/dev/shm', '/proc/1/cwd'):\n"
        "    try: names = set(os.listdir(path))\n    except OSError: continue\n"
        "    if 'secret' in names: seen.append(path)",
    ),
    _row("mounts and namespaces", REFUSED,
         "carried_out('mount', 165, b'none', b'.', b'tmpfs', 0, None)\ncarried_out('namespace', 272, 0x10000000)"),
    _row(
        "named sockets",
        REFUSED,
        "for kind in (socket.AF_UNIX, socket.AF_INET, socket.AF_NETLINK, 38, 40):\n"
        "    attempt(kind, socket.socket, kind, socket.SOCK_DGRAM)\n"
        "one, other = socket.socketpair()\nattempt('name', one.bind, chr(0) + 'ctpo')\none.close(), other.close()",
    ),
    _row("terminals", REFUSED, "for name in ('ptmx', 'tty', 'pts/ptmx'): attempt(name, os.open, f'/dev/{name}', 0)"),
    _row(
        "kernel settings and control groups",
        REFUSED,
        "for path in ('/proc/sys/kernel/domainname', '/proc/self/oom_score_adj', '/sys/fs/cgroup/cgroup.procs'):\n"
        "    attempt(path, open, path, 'r+')\nattempt('host', socket.sethostname, 'x')",
    ),
    _row(
        "access times of libraries",
        (OWN, OWN, SIDE_CHANNEL),
        "open(json.decoder.__file__, 'rb').read()",
        "if os.stat(json.decoder.__file__).st_atime_ns != before: seen.append('read')",
        "before = os.stat(json.decoder.__file__).st_atime_ns",
    ),
    _row(
        "free disk space",
        (OWN, OWN, SIDE_CHANNEL),
        "with open('full', 'wb') as file: file.write(bytes(4 << 20))\nos.remove('full')",
        "if os.statvfs('.').f_bfree != before: seen.append('used')",
        "before = os.statvfs('.').f_bfree",
    ),
    _row(
        "page cache",
        SIDE_CHANNEL,
        "os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)",
        "try: os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)\nexcept OSError: seen.append('away')",
        "file = open(json.__file__, 'rb')",
    ),
    _row(
        "kernel counters",
        SIDE_CHANNEL,
        "for end in os.pipe(): os.close(end)",
        "numbers = []\nfor _ in range(2):\n    ends = os.pipe()\n    numbers.append(os.fstat(ends[0]).st_ino)\n"
        "    for end in ends: os.close(end)\nif numbers[1] - numbers[0] > 1: seen.append('counted')",
    ),
    _row(
        "memory, CPU and load",
        SIDE_CHANNEL,
        "bytearray(32 << 20)",
        "if os.getloadavg()[0] > 0 or os.sysconf('SC_AVPHYS_PAGES') != before: seen.append('load')",
        "before = os.sysconf('SC_AVPHYS_PAGES')",
    ),
]  # fmt: skip
