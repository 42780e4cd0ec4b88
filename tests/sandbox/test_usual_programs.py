"""Programs as people write them work at every level that isolates; or they are told the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.sandbox.conftest import Runner, runner
from tests.sandbox.other_users import EVERYWHERE, Host, server_of

pytestmark = pytest.mark.xdist_group("sandbox-users")

WORKS = {
    "a pool of threads": "from multiprocessing.pool import ThreadPool\nprint(ThreadPool(2).map(abs, [-1]))",
    "another name of it": "from multiprocessing.dummy import Pool\nwith Pool(3) as p: print(p.map(abs, [-1]))",
    "many tasks for it": (
        "from multiprocessing.pool import ThreadPool\nwith ThreadPool(8) as pool:\n"
        "    assert sorted(pool.imap_unordered(abs, range(-500, 0))) == list(range(1, 501))\n"
        "    assert pool.apply_async(pow, (2, 5)).get(5) == 32\nprint([1])"
    ),
    "a queue": "import multiprocessing as m\nq = m.Queue(); q.put(1); print([q.get(timeout=5)])",
    "locks": (
        "import multiprocessing as m, threading\nlock, again, few = m.Lock(), m.RLock(), m.BoundedSemaphore(2)\n"
        "with lock: assert not lock.acquire(False) and not lock.acquire(timeout=0.01)\n"
        "with again, again: pass\n"
        "for wrong, error in ((lock, ValueError), (again, AssertionError), (few, ValueError)):\n"
        "    try: wrong.release()\n    except error: pass\n    else: raise SystemExit('released')\n"
        "assert few.acquire() and few.acquire() and not few.acquire(False) and few.get_value() == 0\n"
        "held = again.acquire()\nother = threading.Thread(target=lambda: print([int(not again.acquire(False))]))\n"
        "other.start(); other.join()"
    ),
    "values of several processes": (
        "import multiprocessing as m\nv, a, r = m.Value('i', 0), m.Array('d', 3), m.RawArray('i', 1 << 20)\n"
        "with v.get_lock(): v.value += 1\na[:] = [1, 2, 3]; r[0] = 1; print([v.value * r[0]])"
    ),
    "an integer of 6,021 digits": "n = 2**20000\nprint([int(len(str(n)) == 6021 and int(str(n)) == n)])",
    "many threads": (
        "import threading\nend = threading.Event()\nthreads = [threading.Thread(target=end.wait) for _ in range(120)]\n"
        "for t in threads: t.start()\nend.set()\nfor t in threads: t.join()\nprint([1])"
    ),
    "deep calls in a thread": (
        "import threading\ndef f(n): return n and sorted([1], key=lambda x: f(n - 1)) and 0\n"
        "def g():\n    try: f(10**5)\n    except RecursionError: print([1])\n"
        "t = threading.Thread(target=g); t.start(); t.join()"
    ),
    "a thread of C": (
        "import ctypes, time\nlibc = ctypes.CDLL(None); thread = ctypes.c_ulong(); start = time.monotonic()\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.usleep, ctypes.c_void_p(200_000))\n"
        "print([int(libc.pthread_join(thread, None) == 0 and time.monotonic() - start > 0.1)])"
    ),
    "signals to itself": (
        "import os, signal, threading, time\ngot = []\n"
        "for s in (10, 12, 14, 40): signal.signal(s, lambda number, _: got.append(number))\n"
        "signal.raise_signal(10); signal.pthread_kill(threading.get_ident(), 12); os.kill(os.getpid(), 40)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1); print([int(got == [10, 12, 40, 14])])"
    ),
    "a time zone": (
        "import datetime, zoneinfo\nd = datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Paris'))\n"
        "print([int(d.utcoffset().total_seconds() == 7200)])"
    ),
    "its interpreter and libraries": (
        "import os, sys, json, sqlite3, ssl, ctypes, decimal, lzma, readline\n"
        "print([int(os.path.isfile(sys.executable) and os.path.isfile(json.__file__))])"
    ),
    "an event": (
        "import multiprocessing as m, threading\ne, c = m.Event(), m.Condition()\n"
        "threading.Timer(0.05, e.set).start(); assert e.wait(5)\nwith c: c.notify_all()\nprint([1])"
    ),
    "a database": (
        "import sqlite3\none, two = sqlite3.connect('x.db'), sqlite3.connect('x.db')\n"
        "one.execute('create table t (a)'); one.execute('insert into t values (1)'); one.commit()\n"
        "print([a for a, in two.execute('select a from t')])"
    ),
    "a database with a log": (
        "import sqlite3\nc = sqlite3.connect('x.db')\n"
        "assert c.execute('pragma journal_mode=wal').fetchone()[0] == 'wal'\n"
        "with c: c.execute('create table t (a)'); c.execute('insert into t values (1)')\n"
        "print([a for a, in sqlite3.connect('x.db').execute('select a from t')])"
    ),
    "a lock on a file": (
        "import fcntl\nf = open('f', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_UN)\nprint([1])"
    ),
    "copies": (
        "import os, shutil\nopen('a', 'w').write('x'); os.mkdir('d')\n"
        "shutil.copy('a', 'd/b'); shutil.copy2('a', 'd/c')\n"
        "shutil.copytree('d', 'e'); shutil.move('e', 'f'); print([len(os.listdir('f')) - 1])"
    ),
    "modes and dates": (
        "import os, pathlib\np = pathlib.Path('p'); p.touch(); p.touch(); p.chmod(0o600); os.utime('p', (1, 1))\n"
        "os.truncate('p', 5); os.fchmod(os.open('p', 0), 0o644)\n"
        "os.chmod('p', 0o600, dir_fd=os.open('.', 0), follow_symlinks=True); print([p.stat().st_size - 4])"
    ),
    "an archive": (
        "import os, tarfile, zipfile\nopen('a', 'w').write('x')\nwith tarfile.open('t', 'w') as t: t.add('a')\n"
        "with zipfile.ZipFile('z', 'w') as z: z.write('a')\ntarfile.open('t').extractall('o')\n"
        "zipfile.ZipFile('z').extractall('q'); print([len(os.listdir('o') + os.listdir('q')) - 1])"
    ),
    "a shelf": "import shelve\nwith shelve.open('s') as s: s['a'] = 1\nprint([shelve.open('s')['a']])",
    "temporary files": (
        "import tempfile\nwith tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile(dir=d) as f, "
        "tempfile.TemporaryFile() as g:\n    f.write(b'x'); g.write(b'y')\nprint([1])"
    ),
    "times of its own": (
        "import threading, time\nt = time.clock_gettime(time.pthread_getcpuclockid(threading.get_ident()))\n"
        "assert t > 0 and time.process_time() > 0 and time.thread_time() > 0\nprint([1])"
    ),
    "an event loop": (
        "import asyncio\nasync def f(): return await asyncio.to_thread(abs, -1)\nprint([asyncio.run(f())])"
    ),
}  # fmt: skip
"""Each prints [1]."""

TOLD = {
    "import multiprocessing as m; m.Pool(2).map(abs, [1])": "one process per run: use threads",
    "from concurrent.futures import ProcessPoolExecutor as P\nwith P(2) as p: list(p.map(abs, [1]))": "use threads",
    "import multiprocessing as m; m.Process(target=print).start()": "use threads",
    "import os; os.fork()": "use threads",
    "import os; os.chmod('gone', 0o600)": "No such file or directory: 'gone'",
    "import os; os.utime('gone')": "No such file or directory",
    "import os; os.truncate('gone', 0)": "No such file or directory: 'gone'",
}
"""Program -> what the last line of its error says."""


@pytest.fixture(scope="module", params=EVERYWHERE)
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    host: Host = request.param
    with contextlib.ExitStack() as stack:
        url, _ = stack.enter_context(server_of(host))
        yield stack.enter_context(runner(url))


@pytest.mark.parametrize("name", WORKS)
def test_it_works(run: Runner, name: str) -> None:
    result = run(WORKS[name])
    assert (result.status, result.stdout) == ("success", "[1]\n"), result


@pytest.mark.parametrize("code", TOLD)
def test_it_is_told_the_reason(run: Runner, code: str) -> None:
    result = run(code)
    assert result.status == "runtime_error" and TOLD[code] in result.stderr.splitlines()[-1], result
