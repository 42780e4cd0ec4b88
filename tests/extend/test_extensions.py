"""Users' modules in a configuration: found, checked all at once, recorded, and not changed unnoticed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.checks import check_extensions
from ctpo_megatron.cli import main
from ctpo_megatron.config import Config, ConfigError, load_config
from ctpo_megatron.run import RunDirectoryError, open_run_directory
from tests.support import ranks
from tests.support.task import SMALL_TASK, task_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a configuration file; modules from it are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "run.yaml").write_text(f"defaults: {ROOT / 'configs' / 'quickstart.yaml'}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "toolmath").symlink_to(task_folder(*SMALL_TASK))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


def config(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "run.yaml", ["run.name=mine", *overrides])


@pytest.mark.parametrize("value", ["3", "[a]", "{nam: x}", "{name: x, argumnts: {}}", "{arguments: {}}"])
def test_anything_else_than_a_name_with_arguments_is_refused(folder: Path, value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"reward.function .*must be a name, or \{name: \.\.\., arguments: \{\.\.\.\}\}"
    ):
        config(folder, f"reward.function={value}")


def test_all_problems_are_said_at_once(folder: Path) -> None:
    (folder / "parts.py").write_text(
        "NUMBER = 1\ndef two(trajectory, prompt, *, weight): ...\nclass Silent: ...\n"
        "class Odd:\n    def __init__(self, *, model): ...\n    def __call__(self, text): ...\n"
    )
    (folder / "broken.py").write_text("raise OSError('no network here')\n")
    (folder / "needy.py").write_text("import a_module_that_nobody_has\n")
    named = {
        "word": ("maths", "no such part; write math_verify or package.module:Name"),
        "missing": ("nowhere:f", "there is no module 'nowhere' in extensions.path or among the installed packages"),
        "attribute": ("parts:f", "parts has no 'f'"),
        "raises": ("broken:f", "importing broken failed: OSError: no network here"),
        "needs": ("needy:f", "needy needs a module that is missing: 'a_module_that_nobody_has'"),
        "number": ("parts:NUMBER", "is neither a function nor a class"),
        "unbound": ("parts:two", "argument: 'weight'; its signature is"),
        "surplus": ("{name: parts:two, arguments: {weight: 1, wait: 2}}", "got an unexpected keyword argument 'wait'"),
        "silent": ("parts:Silent", "is a class without __call__(self, trajectory, prompt)"),
        "call": ("{name: parts:Odd, arguments: {model: m}}", "too many positional arguments"),
        "good": ("{name: parts:two, arguments: {weight: 1}}", None),
    }
    mapping = ", ".join(f"{key}: {value}" for key, (value, _) in named.items())
    with pytest.raises(ConfigError) as refused:
        check_extensions(config(folder, f"reward.by_source={{{mapping}}}"))
    messages = {problem.key.rpartition(".")[2]: str(problem) for problem in refused.value.problems}
    assert messages.keys() == named.keys() - {"good"}
    for key, (_, text) in named.items():
        assert text is None or text in messages[key], messages[key]


def test_a_folder_that_is_not_there_is_said(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"extensions.path = .*nowhere.*: no such folder"):
        check_extensions(config(folder, "extensions.path=[nowhere]"))


def write_parts(folder: Path) -> None:
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "judge.py").write_text(
        "import helper\nfrom pack.words import GOOD\ndef f(trajectory, prompt): ...\n"
    )
    (folder / "pack" / "words.py").write_text("GOOD = 1\n")
    (folder / "helper.py").write_text("import json\n")
    (folder / "unused.py").write_text("")


FUNCTION = "reward.function=pack.judge:f"
FILES = {"helper.py", "pack/__init__.py", "pack/judge.py", "pack/words.py"}


def test_a_run_keeps_the_code_that_it_loaded(folder: Path) -> None:
    write_parts(folder)
    run = open_run_directory(config(folder, FUNCTION))
    copies = {str(path.relative_to(run / "extensions")) for path in (run / "extensions").rglob("*") if path.is_file()}
    assert copies == FILES
    assert all((run / "extensions" / name).read_bytes() == (folder / name).read_bytes() for name in FILES)


def test_installed_modules_below_the_folder_are_not_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = folder / ".venv" / "lib" / "site-packages"
    site.mkdir(parents=True)
    (site / "installed_module.py").write_text("")
    (folder / "mine.py").write_text("import installed_module\ndef f(trajectory, prompt): ...\n")
    monkeypatch.syspath_prepend(str(site))
    run = open_run_directory(config(folder, "reward.function=mine:f"))
    assert [path.name for path in (run / "extensions").iterdir()] == ["mine.py"]


def test_a_run_without_users_parts_records_nothing(folder: Path) -> None:
    run = open_run_directory(config(folder))
    assert not (run / "extensions").exists()


def start(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Open the run in a process of its own, as a job does: it gives the directory back, and reads modules anew."""
    return ranks.prefork().run(open_run, FUNCTION, *overrides, deadline_s=60, directory=folder)


def open_run(*overrides: str) -> None:
    open_run_directory(load_config("run.yaml", ["run.name=mine", *overrides]))


def resume(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return start(folder, "run.resume=true", *overrides)


def test_a_resume_with_changed_code_warns_and_keeps_both(folder: Path) -> None:
    write_parts(folder)
    assert start(folder).returncode == 0
    run = folder / "runs" / "mine"
    same = resume(folder)
    assert same.returncode == 0 and "users' code" not in same.stderr
    (folder / "helper.py").write_text("import json, re\n")
    (folder / "pack" / "words.py").unlink()
    (folder / "pack" / "judge.py").write_text("import helper\nGOOD = 1\ndef f(trajectory, prompt): ...\n")

    resumed = resume(folder)
    changed = "helper.py, pack/judge.py, pack/words.py"
    assert resumed.returncode == 0
    assert f"users' code is not what the run was begun with: {changed}. Its steps from now on" in resumed.stderr
    assert not (run / "extensions" / "pack" / "words.py").exists()
    assert (run / "extensions" / "helper.py").read_text() == "import json, re\n"
    assert (run / "extensions.previous" / "helper.py").read_text() == "import json\n"
    again = resume(folder)  # it is the run's code now
    assert again.returncode == 0 and "users' code" not in again.stderr


def test_overwriting_does_not_delete_the_code_it_needs(folder: Path) -> None:
    run = folder / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{}")
    (run / "inside.py").write_text("def f(trajectory, prompt): ...\n")
    with pytest.raises(RunDirectoryError, match=r"would delete what this run needs: .*inside.py"):
        open_run_directory(config(folder, "reward.function=inside:f", f"extensions.path=[{run}]", "run.overwrite=true"))


def ctpo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return ranks.prefork().run(main, [*arguments], deadline_s=120, directory=folder)


def test_a_dry_run_imports_the_parts_and_names_their_place(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "print('imported')\ndef f(trajectory, prompt, *, weight): ...\ndef g(trajectory, prompt): ...\n"
    )
    with (folder / "run.yaml").open("a") as file:
        file.write("reward:\n  function: {name: 'mine:f', arguments: {wait: 1}}\n")
    refused = ctpo(folder, "train", "run.yaml", "--dry-run")
    assert refused.returncode == 2, refused.stderr
    message = 'run.yaml:3: reward.function = "mine:f": cannot be called with (trajectory, prompt, wait=...)'
    assert message in refused.stderr
    good = ctpo(folder, "train", "run.yaml", "--dry-run", "reward.function=mine:g")
    assert good.returncode == 0, good.stderr
    assert "imported" in good.stdout


def test_report_and_export_never_import_users_modules(folder: Path) -> None:
    (folder / "mine.py").write_text("def f(trajectory, prompt): ...\n")
    run = open_run_directory(config(folder, "reward.function=mine:f"))
    (folder / "mine.py").write_text("open('imported', 'w').close()\nraise SystemExit('never')\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    reported = ctpo(folder, "report", str(run))
    assert reported.returncode == 0, reported.stderr
    exported = ctpo(folder, "export", str(run))
    assert exported.returncode == 2 and "has neither checkpoints nor model/" in exported.stderr
    assert not (folder / "imported").exists()
