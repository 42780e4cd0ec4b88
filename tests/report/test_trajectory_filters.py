"""Filters of trajectories, through the front door: a table of how many match, and which, by a plain filter."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from ctpo_megatron.data.verdict import NoVerdict
from ctpo_megatron.tracking import read_trajectories, trajectory_files, write_trajectories
from tests.report.test_watch import get, served
from tests.tracking.synthetic_run import decode, make_groups, ratio_fields, write_run

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
    """Addresses of what matches, newest step first, each dump in its order."""
    names = []
    for step, path in sorted(trajectory_files(run_dir, folder).items(), reverse=True):
        seen: dict[tuple[str, int], int] = {}
        for record in read_trajectories(path):
            key = (record["prompt_id"], record["sample_index"])
            repeat = seen[key] = seen.get(key, -1) + 1
            if passes(filters, step, record):
                prefix = "step" if folder == "trajectories" else "evaluation"
                names.append(f"{prefix}-{step}-{key[0]}-{key[1]}" + (f".{repeat}" if repeat else ""))
    return names


@pytest.fixture(scope="module")
def address(run_dir: Path) -> Iterator[str]:
    with served(run_dir) as (_, url):
        yield url


def matching(address: str, filters: dict[str, Any], source: str) -> list[str]:
    fields = {"source": source} | {
        name: str(filters[name]) for name in ("text", "tool", "finish", "prompt") if name in filters
    }
    if "steps" in filters:
        fields["step"] = str(filters["steps"])
    if filters.get("reward") == "none":
        fields["verdict"] = "no"
    elif "reward" in filters:
        fields |= {"reward_min": str(filters["reward"]), "reward_max": str(filters["reward"])}
    names: list[str] = []
    for page in (1, 2):
        shown = get(address, "/trajectories?" + urlencode(fields | {"page": str(page)})).text
        names += re.findall(r'href="/trajectory/([^#"]+)#', shown)
    return names


@pytest.mark.parametrize("row", TABLE, ids=lambda row: str(row["filters"]))
def test_filters_find_what_a_plain_filter_finds(address: str, run_dir: Path, row: dict[str, Any]) -> None:
    for source, folder in (("training", "trajectories"), ("evaluation", "evaluation")):
        if source in row:
            names = matching(address, row["filters"], source)
            assert names == expected(run_dir, row["filters"], folder)
            assert len(names) == row[source]
