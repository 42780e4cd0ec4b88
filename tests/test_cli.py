"""The `ctpo` command: exit codes, clean messages, a dry run that touches nothing, and help without heavy imports."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron import __version__, cli, engines
from ctpo_megatron.cli.errors import report_error
from ctpo_megatron.config import Config
from ctpo_megatron.engines import EngineError
from ctpo_megatron.policy import RankLost, RankZeroError
from ctpo_sandbox import temporary
from tests.support.command import Invoke
from tests.support.deadlines import scaled
from tests.support.task import SMALL_TASK, task_folder

CONFIG = """\
run: {name: first, steps: 4}
model: {path: data/model}
data: {train: [data/train.parquet], max_prompt_tokens: 64, tool_in_prompt: false}
policy: {micro_batch_tokens: 1024, mini_batch_prompts: 32}
rollout: {max_response_tokens: 176, engine: {max_model_len: 256, kv_cache_mb: 64, dtype: float32}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test in its own folder with one good configuration, on a machine without CUDA and torchrun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ctpo_megatron.cli.train.torch_has_cuda", lambda: False)
    monkeypatch.setattr("ctpo_megatron.cli.train.has_cuda_device", lambda: False)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "first.yaml").write_text(CONFIG)
    (tmp_path / "data").symlink_to(task_folder(*SMALL_TASK))
    return tmp_path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the driver that remembers its configuration."""
    module: Any = types.ModuleType("ctpo_megatron.train")
    module.main = lambda config, *_: vars(module).update(config=config) or 0
    monkeypatch.setitem(vars(engines), "begin_ray", lambda _: nullcontext())
    monkeypatch.setattr("ctpo_megatron.cli.train.stop_signal", lambda *_: None)
    monkeypatch.setitem(sys.modules, "ctpo_megatron.train", module)
    return module


@pytest.fixture
def second_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of rank 1 of 2, as torchrun makes it."""
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)


def raising(error: BaseException, cause: BaseException | None = None) -> Callable[[Config], int]:
    """A driver that fails."""

    def main(*_: object) -> int:
        raise error from cause

    return main


HEAVY = {"torch", "transformers", "ray", "vllm", "megatron", "fastapi", "numpy", "pyarrow", "vl_convert"}
CONFIGURATION = {"pydantic", "omegaconf", "rich", "yaml"}


IMPORTED = """
import json, os, sys
from ctpo_megatron.cli import main

for arguments, banned in json.loads(sys.argv[1]):
    if os.fork() == 0:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        sys.exit(", ".join(sorted({*banned} & {*sys.modules})) or status)
    if os.wait()[1]:
        sys.exit(f"ctpo {' '.join(arguments)} imports one of these")
"""


def test_what_a_verb_does_not_import() -> None:
    """Each verb is called in a fork of a process that has imported the command alone."""
    verbs = [
        (["--help"], [*HEAVY, *CONFIGURATION]),
        (["train", "first.yaml", "--dry-run", "--shapes", "qwen3_0_6b"], [*HEAVY]),
        *(
            ([verb, "--help"], [*HEAVY])
            for verb in ("train", "init", "report", "compare", "verify", "export", "doctor")
        ),
    ]
    command = [sys.executable, "-c", IMPORTED, json.dumps(verbs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "status", "said"),
    [
        ("ctpo_kernels.loss", 2, "ctpo verify: ctpo_kernels is not installed, and this needs it: pip install "),
        ("torch", 2, "ctpo verify: torch is not installed, and this needs it: pip install "),
        ("ctpo_megatron.none", 1, "ModuleNotFoundError: "),  # a bug of ours
    ],
)
def test_a_package_that_a_login_node_lacks_is_named(
    capsys: pytest.CaptureFixture[str], module: str, status: int, said: str
) -> None:
    assert report_error(ModuleNotFoundError(f"No module named {module!r}", name=module), "verify") == status
    assert capsys.readouterr().err.startswith(said)


def test_dry_run_prints_the_plan_and_touches_nothing(folder: Path, invoke: Invoke, driver: Any) -> None:
    status, out, err = invoke("train", "first.yaml", "--dry-run", "-v", "run.seed=7")
    assert status == 0 and "  seed: 7\n" in out and "  path: data/model\n" in out
    assert re.search(r"  a step +1 updates  32 prompts x 8 samples", out)
    assert "\nSystem prompt\nnone\n" in out
    line = "Objective: ctpo: cumulative ratio, window (-0.025, +0.05) sqrt(t), dual 0.05, mean per sequence"
    assert out.count(line) == 1
    assert "warning: first.yaml:4: policy.mini_batch_prompts = 32: makes exactly one update per batch" in err
    assert {path.name for path in folder.iterdir()} == {"first.yaml", "data"}
    assert not hasattr(driver, "config")
    status, out, _ = invoke("train", "first.yaml", "--dry-run")
    assert status == 0 and len(out.splitlines()) <= 28 and f"  ctpo  {line}" in out
    assert "CUDA" not in out and "GPU" not in out


def test_what_torchrun_starts_imports_no_library_before_it_has_a_folder_for_temporary_files() -> None:
    """wandb makes two when megatron-core imports it; outside of our folder they would outlive a killed run."""
    command = [sys.executable, "-X", "importtime", "-m", "ctpo_megatron.train", "absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "absent.yaml: no such configuration" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "import time:" in line}
    assert "ctpo_megatron.cli" in imported
    assert not {"torch", "transformers", "ray", "vllm", "megatron", "wandb"} & imported


def test_dry_run_for_another_machine(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = ["train", "first.yaml", "--dry-run", "-v", "rollout.engine.kv_cache_mb=null"]
    (here_status, here, _), (there_status, there, _) = invoke(*arguments), invoke(*arguments, "--cuda")
    assert here_status == there_status == 0
    assert re.search(r"KV cache of each +[\d,]+ MiB  128 sequences x 256 tokens x [\d,]+ bytes, at most", here)
    assert re.search(r"  ranks +4  data parallel", there) and "KV cache of each" not in there
    assert "on CUDA" in there and "on CUDA" not in here
    assert "Memory of a node on a CPU" in here and "Memory of a node on a CPU" not in there


@pytest.mark.parametrize("given, then", [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_sleep(given: str | None, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert os.environ["OMP_WAIT_POLICY"] == then


def test_output_that_nobody_reads_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "ctpo_megatron.cli", "train", "first.yaml", "--dry-run"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr.count("BrokenPipeError")) == (128 + signal.SIGPIPE, 0), done.stderr


def test_a_current_directory_that_was_deleted(folder: Path, invoke: Invoke) -> None:
    """As by another shell that has cloned the repository anew."""
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    status, _, err = invoke("doctor")
    assert status == 2 and err.startswith("ctpo: the current directory was deleted; change to")


CLOSED = """
import contextlib, os, sys, types
from ctpo_megatron import cli, engines
from ctpo_megatron.cli import train
train.torch_has_cuda = lambda: False
engines.begin_ray = lambda _: contextlib.nullcontext()
driver = sys.modules["ctpo_megatron.train"] = types.ModuleType("ctpo_megatron.train")
def main(*_):
    os.write({told}, b"x")
    os.read({closed}, 1)
    return 143
driver.main = main
os._exit(cli.main(["train", "first.yaml"]))
"""


def test_the_status_of_a_run_outlives_its_terminal() -> None:
    (listening, told), (closed, closing), (terminal, own) = os.pipe(), os.pipe(), pty.openpty()
    command = [sys.executable, "-c", CLOSED.format(told=told, closed=closed)]
    process = subprocess.Popen(command, stdin=own, stdout=own, stderr=own, pass_fds=(told, closed))
    os.close(own)
    os.close(told)
    assert os.read(listening, 1) == b"x"
    os.close(terminal)
    os.close(closing)
    assert process.wait(scaled(60)) == 143
    for descriptor in (listening, closed):
        os.close(descriptor)


def test_what_is_left_of_another_job_makes_no_rank(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, driver: Any
) -> None:
    """Of a shell that planned a larger job, or that another launcher has opened."""

    def refusal(*more: str, **variables: str) -> str:
        with monkeypatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            status, _, err = invoke("train", "first.yaml", *more)
        assert status == 2
        return err

    missing = "makes this process a rank of a job, which needs"
    assert f'WORLD_SIZE = "8": {missing} RANK, MASTER_ADDR, MASTER_PORT, too' in refusal(WORLD_SIZE="8")
    for more in ([], ["--dry-run"]):
        said = refusal(*more, RANK="3", WORLD_SIZE="8")
        assert f'RANK = "3": {missing} MASTER_ADDR, MASTER_PORT, too; type unset RANK' in said
    for text in ("two", "", "0"):
        assert f'WORLD_SIZE = "{text}": is not a number of ranks' in refusal(WORLD_SIZE=text)
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, text in (("RANK", "2"), ("RANK", ""), ("LOCAL_RANK", "-1")):
        assert f'{name} = "{text}": is not the number of one of 2 ranks' in refusal(**whole | {name: text})
    assert not hasattr(driver, "config")


def test_a_temporary_directory_that_will_not_do(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", f"/{'x' * 80}")
    status, _, err = invoke("train", "first.yaml")
    assert status == 2 and err.startswith('ctpo train: TMPDIR = "/xxx')
    assert invoke("train", "first.yaml", "--dry-run", "--shapes", "qwen3_0_6b").status == 0
    assert not hasattr(driver, "config")


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_all_problems_at_once_without_traceback(dry: list[str], invoke: Invoke, driver: Any) -> None:
    wrong = ["policy.micro_batch_tokens=9", "eval.every=3", "run.resume=true", "run.overwrite=true"]
    status, out, err = invoke("train", "first.yaml", *wrong, *dry)
    assert (status, out) == (2, "")
    assert err.startswith("ctpo: 3 problems in the configuration:\n  command line: ")
    assert "Traceback" not in err
    assert not hasattr(driver, "config")


def test_train_gets_the_checked_configuration(driver: Any) -> None:
    assert cli.main(["train", "first.yaml", "run.seed=3"]) == 0
    assert driver.config.run.seed == 3


def test_a_process_sweeps_and_takes_a_folder_of_its_own_before_it_starts_anything(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves behind is found by the next start, and by that alone."""
    done: list[str] = []
    for name in ("sweep", "move_in"):
        monkeypatch.setattr(temporary, name, lambda name=name: done.append(name))
    driver.main = lambda *_: done.append("run") or 0
    assert cli.main(["train", "first.yaml"]) == 0
    assert done == ["sweep", "move_in", "run"]
    done.clear()
    assert cli.main(["eval", "no-model"]) == 2
    assert done == ["sweep", "move_in"]


@pytest.mark.parametrize("words", ["run.seed=3 --dry-run run.steps=5", "--dry-run run.seed=3 run.steps=5"])
def test_arguments_in_any_order(words: str, invoke: Invoke) -> None:
    status, out, _ = invoke("train", "first.yaml", "-v", *words.split())
    assert status == 0 and "  seed: 3\n" in out and "  steps: 5\n" in out


def test_unknown_option_is_refused(invoke: Invoke) -> None:
    for arguments in (["train", "first.yaml", "--fast"], ["doctor", "--fast"], ["--a.b=c", "train", "first.yaml"], []):
        status, _, err = invoke(*arguments)
        assert status == 2 and err.startswith("usage: ctpo")


@pytest.mark.usefixtures("second_rank")
def test_only_the_first_rank_speaks(invoke: Invoke) -> None:
    assert invoke("train", "none.yaml") == (2, "", "")
    assert invoke("train", "first.yaml", "--dry-run") == (0, "", "")


@pytest.mark.usefixtures("second_rank")
@pytest.mark.parametrize("kind", [RankZeroError, RankLost, EngineError])
def test_what_failed_in_another_process_is_said_in_one_line(driver: Any, invoke: Invoke, kind: type[Exception]) -> None:
    driver.main = raising(type("Kind", (kind,), {})("rank 1 stops, rank 0 failed: X: y"))
    status, out, err = invoke("train", "first.yaml")
    said = [line for line in err.splitlines() if not line.startswith("warning: ")]
    assert (status, out, said) == (1, "", ["ctpo: rank 1 stops, rank 0 failed: X: y"])


def test_other_errors_keep_their_traceback(driver: Any, invoke: Invoke) -> None:
    driver.main = raising(RuntimeError("a bug"))
    status, _, err = invoke("train", "first.yaml")
    assert status == 1 and "Traceback" in err and "RuntimeError: a bug" in err


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTDIR])
def test_what_a_file_system_refuses_is_a_message_if_it_says_of_what(driver: Any, invoke: Invoke, number: int) -> None:
    nameless = OSError(number, os.strerror(number))
    of_a_dump = RuntimeError(f"the dump of step 3 could not be written: {nameless}")
    refused = OSError(number, os.strerror(number), "runs/first/metrics.jsonl")
    advice = "; free space where it writes, in /tmp or in /dev/shm (df -h), and start it again"
    ending = f"{advice}\n" if number == errno.ENOSPC else "\n"
    for error, cause, said in ((refused, None, f"'{refused.filename}'"), (of_a_dump, nameless, nameless.strerror)):
        driver.main = raising(error, cause)
        status, _, text = invoke("train", "first.yaml")
        assert status == 1 and text.endswith(f"{said}{ending}") and "Traceback" not in text
    driver.main = raising(nameless)
    status, _, text = invoke("train", "first.yaml")
    assert status == 1 and ("Traceback" in text) == (number != errno.ENOSPC)  # a full disk is one, whatever its name


def test_compare_names_what_is_no_run_and_no_page(folder: Path, invoke: Invoke) -> None:
    status, _, err = invoke("compare", "nowhere", "elsewhere")
    assert status == 2 and "nowhere is not a run directory" in err
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("run: {name: first}\n")
    status, _, err = invoke("compare", "run", "--out", "run")
    assert status == 2 and "--out run is a directory; give a file, such as run/comparison.html" in err


def test_sandbox_serve_passes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from ctpo_sandbox import server

    monkeypatch.setattr(server, "run", lambda args: args.port)
    assert cli.main(["sandbox", "serve", "--port", "5"]) == 5


# --- what is answered to a command line: help, version, a verb that was meant, arguments that no verb takes ---


def test_help_names_every_verb(invoke: Invoke) -> None:
    status, out, _ = invoke("--help")
    assert status == 0
    assert all(f"  {verb} " in out for verb in ("train", "report", "compare", "doctor", "verify", "export", "sandbox"))


def test_version_says_what_a_bug_report_needs(invoke: Invoke) -> None:
    status, said, _ = invoke("--version")
    commit = r"(commit [0-9a-f]{40}(\+changes)?, )?"
    assert status == 0 and re.fullmatch(rf"ctpo-megatron {__version__}, {commit}Python 3\.\d+\.\d+\n", said)


@pytest.mark.parametrize(
    ("typed", "advice"),
    [("trian", "did you mean train?"), ("Evals", "did you mean eval?"), ("fly", "there are init, train, sweep, eval")],
)
def test_a_verb_that_does_not_exist(typed: str, advice: str, invoke: Invoke) -> None:
    status, _, err = invoke(typed, "first.yaml")
    assert status == 2 and f"no verb '{typed}'; {advice}" in err


@pytest.mark.parametrize("verb", ["train", "sweep", "launch"])
def test_overrides_are_not_required(verb: str, invoke: Invoke) -> None:
    status, _, said = invoke(verb)
    assert status == 2 and "a.b=c ...]" in said and "a.b=c" not in said.rpartition("required: ")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "a.yaml", "--gpu-gib", "{}"],
        ["export", "run", "--tolerance", "{}"],
        ["export", "run", "--tensor-parallel", "{}"],
        ["verify", "--max-ranks", "{}"],
        ["verify", "--tolerance", "{}"],
        ["sandbox", "serve", "--slots", "{}"],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
@pytest.mark.parametrize("number", ["0", "-1", "nan", "many"])
def test_numbers_that_must_be_positive(arguments: list[str], number: str, invoke: Invoke) -> None:
    status, _, err = invoke(*(argument.format(number) for argument in arguments))
    assert status == 2 and f"{number} is not a positive" in err
