"""Filters of trajectories, through the front door: a table of how many match, and which, by a plain filter."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron import cli
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.tracking import read_trajectories, trajectory_files, write_trajectories
from tests.tracking.synthetic_run import HOSTILE, decode, make_groups, ratio_fields, write_run

TABLE = yaml.safe_load((Path(__file__).parent / "trajectory_filters.yaml").read_text(encoding="utf-8"))


def write_dump(run_dir: Path, step: int, folder: str = "trajectories") -> None:
    rng = random.Random(step)
    groups = make_groups(rng, 3, 3, 0.4)
    for trajectory in [t for group in groups for t in group.trajectories]:
        trajectory.reward = rng.choice([0.0, 1.0, 0.25, -1.0, None])
        if trajectory.reward is None:
            trajectory.no_verdict = NoVerdict(rng.choice(["timeout", "crash"]), "late")
        trajectory.finish_reason = rng.choice(["answer", "length"])
        for call in trajectory.tool_calls:
            call.status, call.output = rng.choice([("success", "Straße 2"), ("timeout", "lcm"), ("parse_error", "")])
    groups[2].trajectories[0].prompt_id = groups[0].prompt.id  # a step may draw a prompt twice
    write_trajectories(run_dir, step, groups, decode, folder=folder, extra=ratio_fields(rng, groups))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_run(tmp_path_factory.mktemp("runs"), steps=3)
    for folder in ("trajectories", "evaluation"):
        for file in (path / folder).iterdir():
            file.unlink()
    for step in (1, 2, 3):
        write_dump(path, step)
    write_dump(path, 1, "evaluation")
    return path


def passes(filters: dict[str, Any], step: int, record: dict[str, Any]) -> bool:
    statuses = {call["status"] for call in record["tool_calls"]}
    texts = [part["text"] for part in record["segments"]] + [call["output"] for call in record["tool_calls"]]
    first, _, last = str(filters.get("steps", "0-9")).partition("-")
    tool, reward = filters.get("tool"), record["reward"]
    return all(
        (
            int(first) <= step <= int(last or first),
            "prompt" not in filters or record["prompt_id"] == filters["prompt"],
            "finish" not in filters or record["finish_reason"] == filters["finish"],
            "reward" not in filters or reward == (None if filters["reward"] == "none" else filters["reward"]),
            tool is None
            or tool in statuses
            or (tool == "none" and not statuses)
            or (tool == "failed" and bool(statuses) and "success" not in statuses),
            any(filters.get("text", "").casefold() in text.casefold() for text in texts),
        )
    )


def expected(run_dir: Path, filters: dict[str, Any], folder: str) -> list[str]:
    """Addresses of what matches, newest step first, where trajectories of a prompt stand together in each step."""
    names = []
    for step, path in sorted(trajectory_files(run_dir, folder).items(), reverse=True):
        by_prompt: dict[str, list[str]] = {}
        for place, record in enumerate(read_trajectories(path)):
            if passes(filters, step, record):
                prefix = "step" if folder == "trajectories" else "evaluation"
                by_prompt.setdefault(record["prompt_id"], []).append(f"{prefix}-{step}-{place}")
        names += itertools.chain.from_iterable(by_prompt.values())
    return names


OPTIONS = ("steps", "text", "prompt", "reward", "tool", "finish")


def asked(run_dir: Path, filters: dict[str, Any], source: str = "training", *more: str) -> int:
    """Exit status of `ctpo report`."""
    words = [f"--{name}={filters[name]}" for name in OPTIONS if name in filters]
    return cli.main(["report", str(run_dir), *words, *(["--evaluations"] if source == "evaluation" else []), *more])


def shown(run_dir: Path) -> list[str]:
    """Addresses of the trajectories on the page, in its order."""
    return re.findall(r'<article class="episode" id="([^"]+)"', page_of(run_dir))


def page_of(run_dir: Path) -> str:
    return (run_dir / "trajectories.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: str(row["filters"]))
def test_filters_find_what_a_plain_filter_finds(
    run_dir: Path, row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for source, folder in (("training", "trajectories"), ("evaluation", "evaluation")):
        if source not in row:
            continue
        filters = row["filters"] or {"text": ""}
        status, said = asked(run_dir, filters, source), capsys.readouterr()
        assert status == (0 if row[source] else 2)
        if not row[source]:
            assert f"none of {row.get('of', 27 if source == 'training' else 9)} " in said.err
            continue
        assert f"{row[source]} of {row[source]} that match: {run_dir / 'trajectories.html'}" in said.out
        names = expected(run_dir, filters, folder)
        assert shown(run_dir) == names
        assert len(names) == row[source]


def test_the_page_has_tokens_ratio_and_window_of_each_and_names_the_rest(run_dir: Path) -> None:
    assert asked(run_dir, {"steps": "2-3", "text": "boxed"}, "training", "--most", "4") == 0
    page = page_of(run_dir)
    assert len(shown(run_dir)) == 4 and page.count("data-ratio='[") == 4
    assert re.search(r'data-t="probability 0\.\d+ · cumulative log-ratio [+-]0\.\d+ in \[-0\.\d+, \+0\.\d+\]"', page)
    assert "18 of 18 trajectories match: --steps 2-3 --text boxed." in page
    assert "Not in this file: 14 of the 18 trajectories that match" in page
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="chart-data">', '<script type="text/plain" id="vega">', "<script>",
    ]  # fmt: skip


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=2, final=HOSTILE)
    assert asked(run_dir, {"steps": "2"}) == 0
    assert shown(run_dir) and HOSTILE not in page_of(run_dir)
    assert asked(run_dir, {"text": HOSTILE}) == 0
    assert shown(run_dir) and HOSTILE not in page_of(run_dir)


def test_a_damaged_dump_is_named_and_the_others_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = write_run(tmp_path, steps=2)
    broken = trajectory_files(run_dir)[2]
    broken.write_bytes(broken.read_bytes()[:-30])
    assert asked(run_dir, {"text": "722"}) == 0
    assert {name.split("-")[1] for name in shown(run_dir)} == {"1"}
    assert "step_000002.parquet, which cannot be read" in page_of(run_dir) and "step_000002" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "x"], "'x' is no list of steps such as 1,20-24"),
        (["--reward", "much"], "'much' is no reward; give a number, or none"),
        (["--tool", "hammer"], "invalid choice: 'hammer'"),
        (["--most", "0"], "--most"),
    ],
)
def test_a_wrong_filter_is_refused(
    run_dir: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(run_dir), *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err
