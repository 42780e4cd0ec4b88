"""The architecture as a test: who may import whom, how long a file may be, and what no module may contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.structure import constants_of_time, module, takes_config
from tests.support.vllm_uses import is_private, reached_privately, uses, within

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "ctpo_megatron"
SEPARATE = {
    "ctpo_answers": ROOT / "answers" / "ctpo_answers",
    "ctpo_kernels": ROOT / "kernels" / "ctpo_kernels",
    "ctpo_sandbox": ROOT / "sandbox" / "ctpo_sandbox",
    "ctpo_launchers": ROOT / "launchers" / "ctpo_launchers",
}

# Lowest level first. A package imports from lower levels only, wherever the import stands; packages of one level do not
# import each other. The root file of a name counts as a package.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("base", "models"),
    ("config",),
    ("data", "objective", "plan"),
    ("rewards", "tracking"),
    ("environments", "policy", "report"),
    ("engines", "verify"),
    ("rollouts",),
    ("checks",),
    ("evaluate", "init", "run"),
    ("sft", "export"),
    ("train",),
    ("cli",),
)
# What the packages beside the trainer may import of ours, as a prefix of the dotted name.
BESIDE: dict[str, tuple[str, ...]] = {
    "ctpo_answers": (),
    "ctpo_kernels": (),
    "ctpo_sandbox": (),
    "ctpo_launchers": ("ctpo_megatron.base", "ctpo_megatron.config", "ctpo_megatron.checks", "ctpo_sandbox"),
}
# Modules other packages may name directly; everything else is reached through the package's front door (`__init__.py`).
SIDE_DOORS = (
    "ctpo_megatron.base",
    "ctpo_megatron.data.records",
    "ctpo_megatron.data.tokens",
    "ctpo_megatron.data.trajectory",
    "ctpo_megatron.data.trajectory_file",
    "ctpo_megatron.config.extension",
    "ctpo_megatron.config.schema",
    "ctpo_megatron.engines.weights",
    "ctpo_megatron.report.run_data",
)
# Packages whose own tests import the front door only; all tests, where a package has none of its own. `base` has no
# door: each of its modules is documented, and may be named (SIDE_DOORS).
BY_THE_DOOR = ("checks", "data", "engines", "environments", "models", "plan", "policy", "rewards", "rollouts", "run")
BY_THE_DOOR += ("tracking",)
# But for their tests of arithmetic that no front door shows: of attention and its rows, of replayed routers, of what
# each rank is sent, and of what is found on a machine.
OF_ARITHMETIC = tuple(
    f"tests/policy/{name}.py"
    for name in (
        "te_layers",
        "test_attention",
        "test_capabilities",
        "test_exchange",
        "test_nodes",
        "test_router_replay",
        "test_shared_prefixes",
    )
)
# Heavy packages that a package must not import anywhere, not even lazily.
NEVER_IMPORT = {
    "ctpo_megatron.models": ("transformers", "ray", "vllm", "megatron"),  # torch where a tensor is, never at import
    "ctpo_megatron.config": ("torch", "transformers", "ray", "vllm", "megatron"),
    "ctpo_megatron.evaluate": ("megatron",),
    "ctpo_answers": ("torch", "numpy", "transformers", "ray", "vllm"),
    "ctpo_sandbox": ("torch", "transformers", "ray", "vllm"),
    "ctpo_kernels": ("transformers", "ray", "vllm", "megatron"),
}
# Where private parts of vLLM may be named (`tests/engines/test_vllm_private.py` says what is private, and lists them).
VLLM_PATCHES = PACKAGE / "engines" / "cpu"
VLLM_WEIGHTS, TRANSFER = PACKAGE / "engines" / "weights", "vllm.distributed.weight_transfer"
VLLM_EXCEPTIONS = {
    # A backend of vllm.distributed.weight_transfer makes layers loadable by what vLLM's own backends call; the base
    # class leaves that to the backend.
    "receiver.py": ("vllm.model_executor.model_loader.reload",),
}
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
PACKAGES = tuple(name for name in LEVEL if (PACKAGE / name).is_dir())
ALL = (*(f"ctpo_megatron.{name}" for name in PACKAGES), *BESIDE)
# What every rank runs. Everything else is rank zero's, or of one process: it calls nothing that others must call, too.
ALL_RANKS = (
    "policy",
    "verify",
    "base/stop.py",
    "engines/weights/tcp.py",
    "engines/weights/vllm.py",
    "checks/ranks.py",
    "run/ranks.py",
)
COLLECTIVES = {"on_rank_zero", "wait_for_ranks", "gather_objects", "gather_on_rank_zero"}
COLLECTIVES |= {"barrier", "broadcast", "all_reduce", "all_gather", "all_gather_object", "broadcast_object_list"}
COLLECTIVES |= {"monitored_barrier", "new_group"}
# The loop, and the supervised stage before it.
DRIVER = ("train.py", "sft.py")
MAX_LINES, MAX_DRIVER_LINES = 500, 150
WHOLE_CONFIG = (
    "cli",
    "config",
    "checks",
    "evaluate",
    "plan",
    "run",
    "train.py",
    "engines",  # the actors get it as a whole
    "environments/prompts.py",  # rows, rendering, parser and rewards decide which prompts there are
    "tracking/trackers/threads.py",  # trackers record it
)
"""Where a parameter may be the whole configuration; others take a section or the few values."""
VERSION_ONLY = "ctpo_megatron"
"""The root package: everybody may read its version, and it imports nothing."""


def folder_of(package: str) -> Path:
    return SEPARATE.get(package) or ROOT / package.replace(".", "/")


def modules_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def all_modules() -> list[Path]:
    return [path for folder in (PACKAGE, *SEPARATE.values()) for path in modules_of(folder)]


def imports_of(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a file, nested and relative ones included."""
    for node in module(path).of(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def package_of(path: Path) -> str:
    """The dotted name of the package a module is in, as relative imports count it."""
    for name, folder in (("ctpo_megatron", PACKAGE), *SEPARATE.items()):
        if path.is_relative_to(folder):
            return ".".join([name, *path.relative_to(folder).parent.parts])
    raise ValueError(path)


def ours(name: str) -> bool:
    return name.split(".")[0] in {"ctpo_megatron", *SEPARATE}


def show(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text}"


def level_of(name: str) -> int:
    """Of a dotted name of the trainer's package."""
    return LEVEL[name.split(".")[1]]


@pytest.mark.parametrize("name", LEVEL)
def test_no_import_goes_upwards(name: str) -> None:
    """Nor to a neighbour on the same level."""
    path = PACKAGE / name
    wrong = [
        show(path, line, imported)
        for path in (modules_of(path) if path.is_dir() else [path.with_suffix(".py")])
        for line, imported in imports_of(path, package_of(path))
        if within(imported, "ctpo_megatron") and imported not in (VERSION_ONLY, f"{VERSION_ONLY}.__version__")
        if not within(imported, f"ctpo_megatron.{name}") and level_of(imported) >= LEVEL[name]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", BESIDE)
def test_a_package_beside_the_trainer_imports_only_what_it_may(package: str) -> None:
    allowed = (package, *BESIDE[package])
    wrong = [
        show(path, line, name)
        for path in modules_of(folder_of(package))
        for line, name in imports_of(path, package_of(path))
        if ours(name) and name != VERSION_ONLY and not any(within(name, prefix) for prefix in allowed)
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ALL)
def test_other_packages_are_entered_by_the_front_door(package: str) -> None:
    wrong = [
        show(path, line, name)
        for path in modules_of(folder_of(package))
        for line, name in imports_of(path, package_of(path))
        if ours(name) and not within(name, package) and not _by_a_door(name)
    ]
    assert wrong == []


def _by_a_door(name: str) -> bool:
    """`from ctpo_megatron.data import X` names the package and one thing in it, and not a module of it."""
    if any(within(name, door) for door in SIDE_DOORS) or not name.startswith("ctpo_megatron."):
        return True
    parts = name.split(".")
    return len(parts) <= 3 and (name in _offered(".".join(parts[:2])) or not _is_module(name))


def _is_module(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).with_suffix(".py").is_file()


@cache
def _offered(package: str) -> frozenset[str]:
    """What a front door imports or lists: `data.pack` is the function there, though a module has the same name."""
    door = folder_of(package) / "__init__.py"
    tree = module(door).tree if door.exists() else ast.Module([], [])
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return frozenset(f"{package}.{name}" for name in names)


@pytest.mark.parametrize("package", NEVER_IMPORT)
def test_light_packages_stay_light(package: str) -> None:
    wrong = [
        show(path, line, name)
        for path in modules_of(folder_of(package))
        for line, name in imports_of(path, package_of(path))
        if name.split(".")[0] in NEVER_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", BY_THE_DOOR)
def test_tests_import_the_front_door(package: str) -> None:
    own = ROOT / "tests" / package
    wrong = [
        found
        for path in modules_of(own if own.is_dir() else ROOT / "tests")
        if str(path.relative_to(ROOT)) not in OF_ARITHMETIC
        for found in _inner_imports(path, package)
    ]
    assert wrong == []


@pytest.mark.parametrize("file", OF_ARITHMETIC)
def test_every_test_of_arithmetic_needs_inner_modules(file: str) -> None:
    assert list(_inner_imports(ROOT / file, Path(file).parts[1]))


def _inner_imports(path: Path, package: str) -> Iterator[str]:
    """Imports of a test from modules of the package it tests."""
    inside = f"ctpo_megatron.{package}"
    for line, name in imports_of(path, f"tests.{package}"):
        is_inner = (
            name.startswith(f"{inside}.") and name not in _offered(inside) and _is_module(name.rpartition(".")[0])
        )
        if is_inner and not any(within(name, door) for door in SIDE_DOORS):
            yield show(path, line, name)


def test_driver_is_short() -> None:
    driver = PACKAGE / "train.py"
    assert len(driver.read_text(encoding="utf-8").splitlines()) <= MAX_DRIVER_LINES


@pytest.mark.parametrize("module", DRIVER)
def test_driver_uses_front_doors_only(module: str) -> None:
    path = PACKAGE / module
    doors = {f"ctpo_megatron.{package}" for package in PACKAGES}
    itself = {f"ctpo_megatron.{name.removesuffix('.py')}" for name in DRIVER}
    wrong = [
        show(path, line, name)
        for line, name in imports_of(path, "ctpo_megatron")
        if ours(name) and name.rpartition(".")[0] not in {*doors, *itself, *SEPARATE} and not _by_a_door(name)
    ]
    assert wrong == []


def test_no_package_is_imported_in_a_circle() -> None:
    """Imports within functions count."""
    graph: dict[str, set[str]] = {}
    for path in modules_of(PACKAGE):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found = {name for _, name in imports_of(path, package_of(path)) if within(name, "ctpo_megatron")}
        names = [name.split(".") for name in found - {VERSION_ONLY}]
        graph.setdefault(here, set()).update({parts[1] for parts in names if (PACKAGE / parts[1]).exists()} - {here})
        graph[here] |= {parts[1] for parts in names if (PACKAGE / f"{parts[1]}.py").exists()} - {here}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def type_name(node: ast.stmt) -> str | None:
    """Of the class or alias that a statement defines; aliases are written as classes are, constants in capitals."""
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        return name if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name) else None
    return None


def test_every_package_has_a_level() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert folders | files == set(LEVEL)


def test_no_type_has_the_name_of_another() -> None:
    """Classes and aliases of types, private ones too: one name, one meaning."""
    places: dict[str, list[str]] = {}
    for path in all_modules():
        for node in module(path).tree.body:
            if (name := type_name(node)) is not None:
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def collectives_in(calls: list[ast.Call]) -> Iterator[tuple[int, str]]:
    """Line and name of every call that all ranks have to make; `gather` of a layout or of ranks is one."""
    for node in calls:
        if isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if name in COLLECTIVES or (name == "gather" and owner.rpartition(".")[2].strip("_") in ("layout", "ranks")):
                yield node.lineno, name


def test_rank_zero_makes_no_collective_call() -> None:
    wrong, found = [], 0
    for path in modules_of(PACKAGE):
        calls = list(collectives_in(module(path).of(ast.Call)))
        if any(path.is_relative_to(PACKAGE / name) for name in ALL_RANKS):
            found += len(calls)
        else:
            wrong += [show(path, line, name) for line, name in calls]
    assert wrong == [] and found > len(ALL_RANKS)  # what is looked for is there


def test_every_module_says_why_it_exists() -> None:
    silent = [str(path.relative_to(ROOT)) for path in all_modules() if not ast.get_docstring(module(path).tree)]
    assert silent == []


def test_no_module_is_too_long() -> None:
    lengths = {path: module(path).lines for path in all_modules()}
    assert [show(path, count, "lines") for path, count in lengths.items() if count > MAX_LINES] == []


@pytest.mark.parametrize("file", sorted(path.relative_to(ROOT) for path in all_modules() if path.name == "timeouts.py"))
def test_constants_of_time_stand_together(file: Path) -> None:
    """A package that has a `timeouts.py` has them all there."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules_of((ROOT / file).parent)
        if path != ROOT / file
        for name in constants_of_time([module(path)])
    ]
    assert wrong == []


def test_the_whole_configuration_goes_only_where_several_sections_are_needed() -> None:
    wrong = [
        show(path, function.lineno, function.name)
        for path in modules_of(PACKAGE)
        if not any(path.is_relative_to(PACKAGE / name) for name in WHOLE_CONFIG)
        for function in module(path).functions
        if takes_config(function)
    ]
    assert wrong == []


def test_one_file_asks_for_cuda() -> None:
    """Code only: a comment or docstring may name the function. It is the first of the policy to be imported."""
    wrong = [
        show(path, node.lineno, "torch.cuda.is_available")
        for path in modules_of(PACKAGE / "policy")
        if path.name != "megatron_import.py"
        for node in module(path).of(ast.Attribute)
        if ast.unparse(node) == "torch.cuda.is_available"
    ]
    assert wrong == []


def _vllm_wrong(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a file outside `engines/cpu` with something of vLLM that the file may not name."""
    text = module(path).text
    found = uses(text)
    allowed = VLLM_EXCEPTIONS.get(path.name, ()) if path.parent == VLLM_WEIGHTS else ()
    for use in found:
        if use.kind == "patch":
            yield use.line, f"replaces {use.name}"
        elif is_private(use.name) and not any(within(use.name, prefix) for prefix in allowed):
            yield use.line, f"names {use.name}"
        elif within(use.name, TRANSFER) and path.parent != VLLM_WEIGHTS:
            yield use.line, f"names {use.name}, which engines/weights alone may"
    if found:  # an object of vLLM, perhaps
        yield from ((line, f"reads .{name}") for name, line in reached_privately(text).items())


def test_only_engines_cpu_patches_vllm_or_names_its_private_parts() -> None:
    """And `engines/weights` alone knows how vLLM takes weights."""
    paths = [path for path in all_modules() if not path.is_relative_to(VLLM_PATCHES)]
    assert [show(path, line, text) for path in paths for line, text in _vllm_wrong(path)] == []


@pytest.mark.parametrize("file", VLLM_EXCEPTIONS)
def test_every_exception_for_vllm_is_needed(file: str) -> None:
    names = [use.name for use in uses((VLLM_WEIGHTS / file).read_text(encoding="utf-8"))]
    needed = [prefix for prefix in VLLM_EXCEPTIONS[file] if any(within(name, prefix) for name in names)]
    assert needed == list(VLLM_EXCEPTIONS[file])


def test_generic_folders_are_no_packages() -> None:
    """A top-level package called `kernels` breaks transformers where Hugging Face's `kernels` is installed."""
    generic = ("answers", "kernels", "sandbox", "launchers", "configs")
    assert [name for name in generic if (ROOT / name / "__init__.py").exists()] == []


# --- the test's own instruments, on files made for them ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import vllm.v1.engine", (1, "names vllm.v1.engine")),
        ("def f():\n    from vllm.config import _x", (2, "names vllm.config._x")),
        ("from vllm import config\nconfig.Y = 1", (2, "replaces vllm.config.Y")),
        ("from vllm.config import C\ndef f(c: C): c._hidden", (2, "reads ._hidden")),
        (f"from {TRANSFER} import A", (1, f"names {TRANSFER}.A, which engines/weights alone may")),
    ],
)
def test_private_parts_of_vllm_are_seen(tmp_path: Path, text: str, expected: tuple[int, str]) -> None:
    file = tmp_path / "receiver.py"  # the name alone allows nothing
    file.write_text(text)
    assert list(_vllm_wrong(file)) == [expected]
