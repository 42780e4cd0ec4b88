"""What a run is expected to write, and a disk that has no room for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctpo_megatron import cli
from ctpo_megatron.config import Config, load_config, read_shapes
from ctpo_megatron.plan import (
    GIB,
    DiskUse,
    check_disk,
    crash_line,
    disk_table,
    disk_use,
)
from ctpo_megatron.run import RunDirectoryError, open_run_directory
from tests.engines.tiny_model import build_tiny_model
from tests.support.prefork import ROOT

CONFIGS = ROOT / "configs"
SPEC = read_shapes(CONFIGS / "models" / "qwen3_4b.json")
RECIPES = {"4b": 4.02e9, "14b": 14.77e9}  # parameters


def recipe(model: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"qwen3_{model}_tir.yaml", [*overrides])


def free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    usage = SimpleNamespace(free=int(gib * GIB))
    monkeypatch.setattr("ctpo_megatron.plan.disk.shutil.disk_usage", lambda folder: usage)


@pytest.mark.parametrize("model", RECIPES)
def test_the_sums_of_a_recipe(model: str) -> None:
    spec = read_shapes(CONFIGS / "models" / f"qwen3_{model}.json")
    config = recipe(model)
    uses = {use.what: use for use in disk_use(config, spec, held_out=60)}
    # bfloat16 weights, two moments and float32 weights; three at a time. The export has the weights alone.
    assert uses["checkpoints"].total == pytest.approx(3 * 14 * RECIPES[model], rel=0.01)
    assert uses["export"].total == pytest.approx(2 * RECIPES[model], rel=0.01)
    # 4,096 trajectories of 512 + 4,000 tokens, and 60 x 32 answers before, every 20 steps and at the end.
    assert uses["trajectories"].total == pytest.approx(305 * 4096 * 4512 * 8, rel=0.01)
    assert (uses["held-out answers"].count, uses["held-out answers"].each) == (17, 60 * 32 * 4512 * 8 + 16384)
    # Every tenth step, and the first and the last, have the ratios of all tokens.
    assert (uses["ratios"].count, uses["ratios"].each) == (32, 4096 * 4512 * 8)
    rows = {what: size for what, size, _ in disk_table([*uses.values()])}
    assert rows["a step"] == "160 MiB"
    assert float(rows["the run"].split()[0]) == pytest.approx(sum(use.total for use in uses.values()) / GIB, rel=0.01)
    sample = {use.what: use for use in disk_use(recipe(model, "tracking.trajectories=sample"), spec, 60)}
    assert sample["trajectories"].total == pytest.approx(305 * (64 * 4512 * 8 + 16384))
    assert "trajectories" not in {use.what for use in disk_use(recipe(model, "tracking.trajectories=none"), spec, 60)}


def test_recorded_experts_take_a_byte_for_each_layer_and_choice() -> None:
    spec = read_shapes(CONFIGS / "models" / "qwen3_30b_a3b.json")

    def uses(*overrides: str) -> dict[str, DiskUse]:
        return {use.what: use for use in disk_use(recipe("4b", *overrides), spec, 60)}

    replay, ahead = "policy.router_replay=true", "rollout.max_staleness=1"
    found = uses(replay)
    assert (found["experts"].count, found["experts"].each) == (305, 4096 * 4512 * 48 * 8)
    grown = uses(replay, ahead)["checkpoints"].each - uses(ahead)["checkpoints"].each
    assert grown == pytest.approx(4096 * 4512 * 48 * 8) and "experts" not in uses()


AUTO = r"19 minutes and the step after them \(checkpoint\.every: auto; writing 52\.4 GiB takes 56\.3 s at 1 "


@pytest.mark.parametrize(
    ("every", "steps", "said"),
    [
        ("auto", 305, AUTO),
        ("0", 305, r"all 305 steps \(checkpoint\.every: 0; a checkpoint after the last step alone\)"),
        ("20", 305, r"20 steps \(checkpoint\.every: 20\)"),
        ("20", 7, r"7 steps "),
    ],
)
def test_what_a_crash_loses(every: str, steps: int, said: str) -> None:
    config = recipe("4b", f"checkpoint.every={every}", f"run.steps={steps}")
    line = crash_line(config, SPEC)
    assert re.match(f"a crash loses at most {said}", line), line


KEEP = "checkpoint.keep_last = 2:"


@pytest.mark.parametrize(
    ("gib", "every", "said"),
    [
        (10, "", f"error: {KEEP} disk of .*ctpo: 10 GiB free, but one checkpoint takes 52"),
        (150, "", f"warning: {KEEP} .* but the run writes .* ratios 4.41 GiB, checkpoints 157 GiB"),
        (200, "0", None),
        (200, "auto", f"warning: {KEEP} .* checkpoints 157 GiB"),
        (20, "0", f"error: {KEEP} .* 20 GiB free, but one checkpoint takes 52"),
        (80, "0", f"warning: {KEEP} .* checkpoints 52.4 GiB"),
        (300, "", None),
    ],
)
def test_a_disk_that_is_too_small_names_the_key_of_what_takes_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, every: str, said: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    free(monkeypatch, gib)
    config = recipe("4b", *([f"checkpoint.every={every}"] if every else []))
    found = [f"{problem.severity}: {problem}" for problem in check_disk(config, SPEC, 0)]
    assert len(found) == (said is not None)
    if said is not None:
        assert re.match(said, found[0]), found


def test_what_the_run_has_written_before_is_not_counted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = recipe("4b", "checkpoint.every=0")
    free(monkeypatch, 70)
    assert [*check_disk(config, SPEC, 0)]
    config.run.directory.mkdir(parents=True)
    with (config.run.directory / "dump").open("wb") as file:
        file.truncate(40 * GIB)  # takes no room
    assert not [*check_disk(config, SPEC, 0)]


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A folder in which every user may write; `tmp_path` is root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.parametrize(
    ("root", "problem"),
    [
        ("file", "/file is a file"),
        ("file/below/it", "/file is a file"),
        ("link", "/link is a link to nothing"),
        ("closed/below", "/closed cannot be written to"),
        ("new/folder", ""),
        ("folder", ""),
    ],
)
def test_a_root_that_cannot_be_made_or_written_to(
    everyones: Path, monkeypatch: pytest.MonkeyPatch, root: str, problem: str
) -> None:
    monkeypatch.chdir(everyones)
    (everyones / "file").touch()
    (everyones / "folder").mkdir(mode=0o777)
    (everyones / "closed").mkdir(mode=0o500)
    (everyones / "link").symlink_to("nothing")
    config = recipe("4b", f"run.root={root}", "checkpoint.every=0")
    user = os.geteuid()
    free(monkeypatch, 1e6)
    try:
        if user == 0:  # to whom nothing is closed
            (everyones / "folder").chmod(0o777)
            os.seteuid(65534)
        problems = [*check_disk(config, SPEC, 0)]
    finally:
        os.seteuid(user)
    if not problem:
        (everyones / root).mkdir(parents=True, exist_ok=True)
        assert problems == []
        return
    (told,) = problems
    assert (told.key, told.severity, told.value) == ("run.root", "error", root)
    assert told.message.endswith(problem)
    with pytest.raises(RunDirectoryError):
        open_run_directory(config if root != "closed/below" or user else recipe("4b", "run.root=file"))


def test_the_dry_run_and_the_doctor_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    build_tiny_model(tmp_path / "model")
    row = {"data_source": "d", "prompt": [{"role": "user", "content": "2+3?"}], "reward_model": {"ground_truth": "5"}}
    for name, count in (("train", 32), ("eval", 10)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * count)
    (tmp_path / "own.yaml").write_text(
        "run: {name: own, root: runs, steps: 4000}\nmodel: {path: model}\n"
        "data: {train: [train.jsonl], eval: [eval.jsonl], max_prompt_tokens: 112, tool_in_prompt: false}\n"
        "policy: {mini_batch_prompts: 2}\nrollout: {tools: [], max_turns: 1, prompts_per_step: 4, "
        "max_response_tokens: 400, engine: {max_model_len: 512, kv_cache_mb: 64}}\n"
    )
    real = shutil.disk_usage
    monkeypatch.setattr(
        "ctpo_megatron.plan.disk.shutil.disk_usage",
        lambda folder: SimpleNamespace(free=200 << 20) if Path(folder).is_relative_to(tmp_path) else real(folder),
    )
    cli.main(["train", "own.yaml", "--dry-run", "-v"])
    shown = capsys.readouterr()
    assert re.search(
        r" a crash loses at most 15 minutes and the step after them \(.* auto; writing .* takes ", shown.out
    )
    # 4 x 8 trajectories of 112 + 200 tokens of 8 bytes, 4,000 times.
    assert re.search(r"trajectories +367 MiB +4,000 x 94 KiB: 32 trajectories x 312 tokens x 8 B", shown.out)
    assert re.search(r"held-out answers .* 10 answers x 312 tokens", shown.out)
    said = "200 MiB free, but the run writes 694 MiB: trajectories 367 MiB, logs 281 MiB"
    assert f'default: tracking.trajectories = "all": disk of runs/own: {said}' in shown.err, shown.err
    cli.main(["doctor", "own.yaml", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]["This machine"]
    (disk,) = [finding for finding in findings if finding["name"] == "disk of runs/own"]
    assert disk["status"] == "note" and disk["detail"].startswith(said)
