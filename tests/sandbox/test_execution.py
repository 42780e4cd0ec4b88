"""A snippet behaves as under `python -u main.py`, and its verdict says what happened to it."""

import subprocess
import sys
import time
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from ctpo_sandbox.inside.libraries import PROMISED
from tests.sandbox.conftest import runner, small_server
from tests.support.deadlines import scaled


def test_success(execute):
    started = time.monotonic()
    result = execute("print(1 + 1)")
    assert (result.status, result.stdout, result.stderr) == ("success", "2\n", "")
    assert 0 < result.wall_s < time.monotonic() - started


def test_stdin_is_what_was_given_and_then_ends(execute):
    assert execute("print(input(), input())", stdin="a\nb\n").stdout == "a b\n"
    assert "EOFError" in execute("input()").stderr


@pytest.mark.parametrize(
    "code",
    [
        "def f(:\n    pass",
        "def f(n):\n    return 1 // n\n\nf(0)",
        "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('two\\nlines')",
        "import atexit\natexit.register(print, 'bye')\nprint(__name__, __import__('sys').argv)",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import atexit, threading\natexit.register(lambda: print(threading.main_thread().is_alive()))",
        "import time\nfrom concurrent.futures import ThreadPoolExecutor as T\n"
        "T(1).submit(lambda: (time.sleep(0.1), print('late')))",
        "import logging, logging.handlers, sys\nto = logging.StreamHandler(sys.stdout)\n"
        "logging.getLogger().addHandler(logging.handlers.MemoryHandler(9, target=to))\nlogging.warning('kept back')",
        "import atexit, weakref\nclass A: pass\na = A()\natexit.register(print, 'last')\n"
        "weakref.finalize(a, print, 'first')",
        "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\n1 / 0",
        "# -*- coding: latin-1 -*-\nprint('caf\u00e9'.encode())",
    ],
)
def test_like_python_main(execute, tmp_path, code):
    (tmp_path / "main.py").write_text(code)
    command = [sys.executable, "-u", "-X", "utf8", "main.py"]
    expected = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(30), check=False)
    result = execute(code)
    assert result.status == ("success" if expected.returncode == 0 else "runtime_error")
    assert result.stdout == expected.stdout
    assert result.stderr == expected.stderr.replace(str(tmp_path / "main.py"), "main.py")


def test_what_programs_may_expect_to_import_is_there(tmp_path):
    """With the limits of a run that names none: scipy and pandas map far more memory than they use."""
    promised = [Requirement(line) for line in metadata.requires("ctpo-megatron")]
    names = sorted(
        found.name for found in promised if found.marker and found.marker.evaluate({"extra": "sandbox-math"})
    )
    assert names == sorted(PROMISED)
    with small_server(tmp_path, tiers=()) as server, runner(server.url) as run:
        assert server.health["not_installed"] == []
        for name in [*names, "scipy.optimize, scipy.stats, scipy.integrate"]:
            result = run(f"import {name}; print('imported')", run_timeout_s=scaled(30))
            assert (result.status, result.stdout) == ("success", "imported\n"), (name, result)


def test_lone_surrogates_do_not_break_the_reply(execute):
    assert "UnicodeEncodeError" in execute(r"print('\ud800')").stderr
    assert "SyntaxError" in execute("print('\ud800')").stderr
    assert execute("import sys; print(len(sys.stdin.buffer.read()))", stdin="\ud800").stdout == "3\n"


def test_every_run_has_random_numbers_of_its_own_in_every_library(execute):
    code = (
        "import random, numpy, sympy.core.random as s\nprint(random.random(), numpy.random.rand(), s.random(), s.rng)\n"
        "print(s._assumptions_rng.random())"
    )
    one, other = (execute(code).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(one[:3] + one[-1:], other[:3] + other[-1:], strict=True))
