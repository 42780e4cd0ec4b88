"""Programs as models write them, to be compared with `python -u main.py`: stdout, exit status, last line of stderr."""

STDIN = "3 4\n1 2 3 4\nabc\n5.5\n"

PROGRAMS: list[str] = [
    # printing and formatting
    "print(1 + 1)",
    "print('a', 'b', sep='-', end='!\\n')",
    "import sys; sys.stdout.write('no newline')",
    "import sys; print('to stderr', file=sys.stderr); print('to stdout')",
    "print('\\u00e9\\u4e2d\\U0001f600', len('\\U0001f600'))",
    "print(repr('tab\\t quote\\' nul\\0'))",
    "print(*range(5), sep='\\n', flush=True)",
    "1 + 1\n'last expression is not printed'",
    # input
    "print(input())",
    "a, b = map(int, input().split()); print(a * b)",
    "import sys; print([line.strip() for line in sys.stdin])",
    "import sys; print(len(sys.stdin.read()))",
    "n = input(); rest = [input() for _ in range(3)]; print(n, rest); input()",
    "import sys; print(sys.stdin.readline(), sys.stdin.readlines())",
    "print(open(0).read().split())",
    "print(open('/dev/stdin').read().split()[0])",
    "import os; print(os.read(0, 3))",
    # exit codes
    "import sys; sys.exit()",
    "import sys; sys.exit(7)",
    "import sys; sys.exit('message')",
    "exit(2)",
    "quit()",
    "raise SystemExit([1, 2])",
    "raise SystemExit(-3)",
    "raise SystemExit(256)",
    "import os; print('lost'); os._exit(3)",
    "import atexit; atexit.register(print, 'bye'); print('hello')",
    "import sys\ntry: sys.exit(4)\nfinally: print('finally')",
    # errors
    "1 / 0",
    "raise ValueError('two\\nlines')",
    "class MyError(Exception): pass\nraise MyError(1, 'b')",
    "try: 1 / 0\nexcept ZeroDivisionError as e: raise RuntimeError('outer') from e",
    "try: 1 / 0\nexcept ZeroDivisionError: raise RuntimeError('during')",
    "try: 1 / 0\nexcept ZeroDivisionError: raise RuntimeError('alone') from None",
    "def f(): return f()\nf()",
    "import no_such_module",
    "open('no_such_file')",
    "raise KeyboardInterrupt",
    "import signal; signal.raise_signal(signal.SIGINT)",
    "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: print('caught')",
    "e = ValueError('noted'); e.add_note('a note'); raise e",
    "import warnings; warnings.warn('careful'); print('on')",
    "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s'); logging.info('hi')",
    "print(len('x' * 10**7))",
    # the language
    "print(__name__, __file__.endswith('main.py'), __doc__, __builtins__.__name__)",
    "from __future__ import annotations\nx: undefined = 1\nprint(__annotations__)",
    "import sys; print(sys.argv[0].endswith('main.py'), len(sys.argv), sys.flags.optimize)",
    "import sys; print(sys.getrecursionlimit()); sys.setrecursionlimit(5000); print(sys.getrecursionlimit())",
    "import sys; sys.setrecursionlimit(0)",
    "def depth(n=1):\n    try: return depth(n + 1)\n    except RecursionError: return n\nprint(depth())",
    "def f(n): return n if n == 0 else f(n - 1)\nprint(f(990))",
    "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n if n == 0 else 1 + f(n - 1)\nprint(f(9000))",
    "import sys; print(sys.modules['__main__'].__name__, 'main' in sys.modules)",
    "class A: pass\nimport pickle; print(type(pickle.loads(pickle.dumps(A()))).__qualname__)",
    # the standard library
    "import sqlite3; c = sqlite3.connect(':memory:'); print(c.execute('select 1 + 1').fetchone())",
    "import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x\n"
    "async def main(): print(await asyncio.gather(*(f(i) for i in range(3))))\nasyncio.run(main())",
    "import asyncio\nasync def f(): raise ValueError('inside')\nasyncio.run(f())",
    "import os, threading; print(threading.main_thread().native_id == os.getpid())",
    "import threading\nt = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); print('after')",
    "import time; a = time.time(); time.sleep(0.01); print(time.time() > a, time.perf_counter() > 0)",
    "import signal\ndef h(*a): raise TimeoutError('alarm')\nsignal.signal(signal.SIGALRM, h); signal.setitimer(0, "
    "0.05)\n"
    "while True: pass",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import signal, os\nsignal.signal(signal.SIGUSR1, lambda *a: print('got')); os.kill(os.getpid(), signal.SIGUSR1)",
    # files
    "open('f.txt', 'w').write('a\\nb\\n'); print(open('f.txt').readlines())",
    "import tempfile; f = tempfile.TemporaryFile(); f.write(b'abc'); f.seek(1); print(f.read())",
    "import pathlib; p = pathlib.Path('d/e'); p.mkdir(parents=True); (p / 'f').write_text('x'); "
    "print(sorted(p.iterdir()))",
    "import os; os.makedirs('a/b'); os.chdir('a'); print(os.listdir(), os.path.basename(os.getcwd()))",
    "open('m.py', 'w').write('v = 5'); import m; print(m.v)",
    "import mmap; m = mmap.mmap(-1, 4096); m[:2] = b'ab'; print(m[:3])",
    "import multiprocessing, ctypes, socket, ssl, curses, select; print('imported')",
]

HEAVY: list[str] = [
    "import numpy as np; print(np.arange(6).reshape(2, 3) @ np.ones((3, 2)), np.linalg.det([[1, 2], [3, 4]]))",
    "import numpy as np; np.random.seed(3); print(np.random.rand(3), np.random.default_rng(5).integers(9, size=4))",
    "import numpy as np; print(np.array([1, 2]) + np.array([1, 2, 3]))",
    "import numpy as np; print(np.float64(1) / 0)",
    "import numpy as np; np.set_printoptions(precision=3); print(np.linspace(0, 1, 4), np.fft.fft([1, 0, 0]))",
    "from sympy import *; x = symbols('x'); print(solve(x**2 - 2, x), integrate(sin(x) / x, x), latex(x**2 / 3))",
    "from sympy import *; x, y = symbols('x y'); print(factor(x**2 - y**2), Matrix([[1, x]]).T, diff(exp(x * y), x))",
    "from sympy import *; print(factorint(360), list(primerange(10)), Rational(1, 3) + 1, pi.evalf(30), "
    "nsimplify(0.5))",
    "import sympy; sympy.sympify('1 +')",
    "import mpmath; mpmath.mp.dps = 40; print(mpmath.zeta(3), mpmath.quad(lambda x: x**2, [0, 1]))",
]
