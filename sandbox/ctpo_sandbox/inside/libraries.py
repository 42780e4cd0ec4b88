"""Library tiers: the modules that a fork server preloads, and the choice of a tier for a snippet."""

import _random
import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ctpo_sandbox.isolation.libc import Step


@dataclass(frozen=True)
class Library:
    """One tier. modules: imported in order; warm_up: code that fills the caches of first calls.

    A snippet that contains any of `words` gets the last tier that lists it; every tier can import everything.
    """

    name: str
    modules: tuple[str, ...]
    words: tuple[str, ...] = ()
    warm_up: str = ""


_STANDARD = (
    "_multiprocessing bisect cmath collections copy datetime decimal fractions functools heapq inspect io itertools "
    "json math numbers operator random re statistics string textwrap time typing"
)
# Two calls of each common kind: sympy imports and builds much of itself at the first call. What Python and sympy change
# at the second call would otherwise be copied in every run.
_SYMPY = """
from sympy import *
x, y = symbols("x y")
for n in (1, 2):
    integrate(x**2 * exp(-n * x), x), integrate(cos(2 * x) * exp(-n * x), x), integrate(n / (x**2 + 4), (x, 0, 1))
    integrate(x**n + n * x, x), summation(x**n, (x, 1, y)), diff(tan(n * x) * log(x), x), limit(sin(n * x) / x, x, 0)
    solve(x**2 - (n + 4) * x + n + 3, x), solve([x + n * y - 3, x - y - 1], [x, y]), solve(x**2 < n + 8, x)
    solve(x**3 - (n + 5) * x**2 + (5 * n + 6) * x - 6 * n, x), solve(sin(x) - Rational(1, n + 2), x)
    solveset(x**2 - n - 1, x), nsolve(cos(x) - n * x, x, 1), Poly(x**4 - n**4, x).all_roots()
    simplify(sin(x) ** 2 + n * cos(x) ** 2), simplify((x**2 - n**2) / (x - n)), trigsimp(sin(2 * n * x) / cos(n * x))
    factor(x**3 - n**3), expand((x + n * y) ** 3), apart(1 / (x**2 - n**2), x), series(exp(n * x), x, 0, 4)
    Matrix([[2, 1], [1, n + 2]]).eigenvals(), Matrix([[1, 2], [3, n + 3]]).inv(), lambdify(x, x**2 + n)(3)
    factorint(2**32 + n), isprime(10**9 + 6 + n), divisors(360 * n), binomial(20, 10 + n), N(pi, 30 * n)
    nsimplify(n / 4), str(sqrt(n * x) / y), latex(x**2 / (n * y))
"""
BUILT_IN = (
    Library("stdlib", tuple(_STANDARD.split())),
    Library("numpy", ("numpy", "numpy.random", "numpy.linalg"), ("numpy",)),
    Library("sympy", ("numpy", "numpy.random", "numpy.linalg", "sympy"), ("sympy",), _SYMPY),
)

PROMISED = ("mpmath", "networkx", "numpy", "pandas", "scipy", "sympy")
"""What programs may expect to import: the extra `sandbox-math` of setup.py."""


def tiers(extra: Iterable[str] = (), wanted: Iterable[str] = ()) -> tuple[Library, ...]:
    """Return the tiers whose packages are installed; `extra` modules form a last tier, on top of the one before it.

    wanted: names of the tiers, always with the standard library; default: all. Raises ValueError naming extra modules
    that cannot be found, and unknown tiers.
    """
    found = [tier for tier in BUILT_IN if all(_installed(name) for name in tier.modules)]
    asked, offered = tuple(wanted), [tier.name for tier in found]
    if not set(asked) <= set(offered):
        raise ValueError(f"--tiers: there is no {', '.join(sorted(set(asked) - set(offered)))}; there are {offered}")
    found = [tier for tier in found if not asked or not tier.words or tier.name in asked]
    names = tuple(extra)
    unknown = [name for name in names if not _installed(name)]
    if unknown:
        raise ValueError(f"--warm: cannot find {', '.join(unknown)} in the server's environment")
    if names:
        below = found[-1]
        words = tuple(name.partition(".")[0] for name in names)
        found.append(Library("extra", (*below.modules, *names), words, below.warm_up))
    return tuple(found)


def absent() -> list[str]:
    """Packages of `PROMISED` that are not installed here."""
    return [name for name in PROMISED if not _installed(name)]


def _installed(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):  # a parent package is missing
        spec = importlib.util.find_spec(name)
        return spec is not None and spec.origin is not None  # a folder without code has no file
    return False


def choose(code: str, available: Iterable[Library]) -> str:
    """Name of the tier for `code`, by the words in it; a wrong guess only costs time."""
    chosen = ""
    for tier in available:
        if not tier.words or any(re.search(rf"\b{re.escape(word)}\b", code) for word in tier.words):
            chosen = tier.name
    return chosen


def load(tier: Library) -> None:
    """Import the tier's modules into the calling process and warm them up."""
    for name in tier.modules:
        importlib.import_module(name)
    exec(tier.warm_up, {})


def seeders() -> list[Step]:
    """Steps that reseed random generators of modules in a forked child, which would otherwise repeat its parent's."""
    places = (("random", "_inst"), ("sympy.core.random", "rng"), ("sympy.core.random", "_assumptions_rng"))
    generators = [getattr(sys.modules[module], name) for module, name in places if module in sys.modules]
    found: list[Step] = [partial(_random.Random.seed, generator) for generator in generators]
    if "numpy.random" in sys.modules:
        found.append(_numpy_seeder(sys.modules["numpy.random"]))
    return found


def _numpy_seeder(random: Any) -> Step:
    """Overwrites the key of numpy's global generator in place: numpy's own seeding touches a hundred pages."""
    generator = random.get_bit_generator()
    address, key = generator.ctypes.state_address, generator.state["state"]["key"].tobytes()
    if ctypes.string_at(address, len(key)) != key:  # this numpy stores it elsewhere
        return partial(random.seed)
    return partial(_fill, address, len(key))


def _fill(address: int, size: int) -> None:
    ctypes.memmove(address, os.urandom(size), size)
