"""Which tests share a process, how long they may take, and Triton's interpreter.

It is prepared before anything imports Triton, and the environment is left as it was.

Triton decides at import whether its own library functions (tl.sum, tl.cumsum, ...) can be interpreted, so it must be
imported under TRITON_INTERPRET=1 once. Kernels are then interpreted if the variable is set where they are defined
(fixture `interpreter` of tests/kernels). The variable does not stay: child processes and other tests must not see it.
With a GPU at hand nothing is prepared: kernels that the GPU runs need the library functions as they are.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import signal
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from ctpo_sandbox import temporary
from tests.support import ranks
from tests.support.command import Invoke, Result
from tests.support.deadlines import scaled
from tests.support.rewriting import write_bytecode

SHARED = {"engines": {"stage", "users_stage", "shared_ray"}, "report": {"demo_run", "page"}}
"""Fixtures of what tests share: of fleets, and of a run with its report."""

FIRST = (
    "ring",
    "engines",
    "resume",
    "rehearsal",
    "tests/verify/test_verify.py",
    "tests/policy/test_layouts.py",
    "tests/policy/test_checkpoint.py",
    "tests/sandbox/test_service.py",
    "sandbox-load",
)
"""Groups that take long, in the order in which they begin: what begins last should be short."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pretend-cuda",
        action="store_true",
        help="run tests/rehearsal, or what is named, with ranks that take the CPU for a GPU",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Tests send them to what they start, which keeps what is ignored here: SIGINT by a shell's `&`, SIGHUP by nohup.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    # A busy machine breaks what goes by the clock of one example. Examples are traced to explain a failure: a handler
    # of SIGALRM, the deadline of the test, then ran for ever in Python 3.11.
    phases = [phase for phase in Phase if phase is not Phase.explain]
    settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=phases)
    settings.register_profile("few", settings.get_profile("tests"), max_examples=30, derandomize=True)
    settings.load_profile("few" if "not slow" in config.getoption("markexpr") else "tests")
    ranks.Default.pretend_cuda = config.getoption("--pretend-cuda")
    if workers := getattr(config.option, "tx", None):  # only in the process that starts the others
        config.add_cleanup(ranks.share().close)
        write_bytecode(config)  # while the server imports
        config.option.tx = [f"popen//python={sys.executable} -m tests.support.worker"] * len(workers)
    if ranks.Default.pretend_cuda and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = ["tests/rehearsal"]


def _import_with_one_thread() -> None:
    """numpy and torch: several test processes share the cores, and threads that wait for each other spin."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            patch.setenv(name, "1")
        with contextlib.suppress(ImportError):
            import numpy  # noqa: F401
            import torch  # noqa: F401


def _import_interpretable_triton() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return
    import torch

    if torch.cuda.is_available():
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language

        if torch.version.cuda:  # vLLM's build for CUDA takes it, and it refuses functions that were made otherwise
            import triton.experimental.gluon  # noqa: F401


_import_with_one_thread()
_import_interpretable_triton()


def _group(item: pytest.Item) -> str:
    """Tests of a group run in one process, which starts what they share once: engines, a sandbox of a level."""
    if marker := item.get_closest_marker("xdist_group"):
        return str(marker.args[0])
    path = item.nodeid.partition("::")[0]
    folder, _, file = path.removeprefix("tests/").partition("/")
    for group, fixtures in SHARED.items():
        if fixtures & set(getattr(item, "fixturenames", ())):
            return group
    if folder == "end_to_end":
        return "resume" if file == "test_kill_resume.py" else "ring"
    if folder == "rehearsal":
        return folder
    if file == "test_attacks.py" and hasattr(item, "callspec"):
        return f"sandbox-{item.callspec.params.get('target', '')}"
    return path


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector, which later looks at none of the tests: they are many, and stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """The group of a test; pytest-xdist reads it before any `pytest_collection_modifyitems` of ours.

    Two markers would make a group of their own, so a test that has one keeps it.
    """
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


@pytest.fixture(autouse=True, scope="session")
def _stay_in_the_temporary_directory() -> Generator[None, None, None]:
    """A run moves its process to a folder of its own for good; here that process is the one of all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(temporary, "move_in", lambda: None)
        yield


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Call `ctpo` with some words; returns its exit status and what it printed."""
    from ctpo_megatron import cli

    def call(*words: str) -> Result:
        try:
            status: int | str | None = cli.main([*words])
        except SystemExit as ended:
            status = ended.code
        return Result(status, *capsys.readouterr())

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """pytest-xdist cannot send half characters, which tests put into logs."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of groups, and deadlines that know how slow the machine is."""
    if items and getattr(items[0].config.option, "loadgroup", False) and "@" not in items[0].nodeid:
        raise pytest.UsageError("pytest-xdist did not group the tests: it does not know this version of pytest")
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = limit.args[0] if limit else float(item.config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)
    first = [group for name in FIRST if (group := groups.pop(name, None))]
    items[:] = [item for group in (*first, *groups.values()) for item in group]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    from tests.support.lanes import Lanes  # needs pytest-xdist, as this hook does

    return Lanes(config, log) if config.getoption("dist") == "loadgroup" else None
