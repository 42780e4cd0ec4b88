"""Runs are grouped by what differs in their configurations; names, places and seeds do not separate them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.config import known_keys
from ctpo_megatron.report.groups import NOT_COMPARED, RunGroup, groups_of, notes_of
from ctpo_megatron.report.run_data import RunData
from tests.tracking.synthetic_run import make_config


def run(name: str = "demo", seed: int = 0, environment: dict[str, Any] | None = None, **changes: Any) -> RunData:
    """A run of the synthetic configuration in runs/<name>. changes: dotted keys, with __ for the dots."""
    config = make_config(Path("runs"), name, run={"seed": seed}).model_dump(mode="json")
    for key, value in changes.items():
        *sections, last = key.split("__")
        node = config
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return RunData(Path("runs") / name, config, {"directory": "/elsewhere"} | (environment or {}), [], [], {})


def part(**arguments: Any) -> dict[str, Any]:
    """A user's part as config.yaml has it."""
    return {"name": "m:R", "arguments": arguments}


def members(groups: list[RunGroup]) -> dict[str, list[str]]:
    return {group.label: [each.directory.name for each in group.runs] for group in groups}


def test_seeds_are_members_of_one_group() -> None:
    runs = [run(f"{preset}-{seed}", seed, objective__preset=preset) for preset in ("grpo", "ctpo") for seed in (10, 9)]
    groups = groups_of(runs)
    assert members(groups) == {"grpo": ["grpo-9", "grpo-10"], "ctpo": ["ctpo-9", "ctpo-10"]}
    assert groups[0].seeds == ["9", "10"]
    assert [group.settings for group in groups] == [{"objective.preset": "grpo"}, {"objective.preset": "ctpo"}]
    assert notes_of(groups) == [
        f"{each.directory.name} is at step 0 of 20." for each in (runs[1], runs[0], runs[3], runs[2])
    ]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("model__path", ("runs/a/task/model", "runs/b/task/model")),
        ("model__path", ("/elsewhere/runs/a/model", "runs/b/model")),
        ("data__train", (["runs/a/task/train.parquet"], ["runs/b/task/train.parquet"])),
        ("tracking__live", ("off", "plain")),
        ("checkpoint__every", (0, 5)),
        ("eval__every", (0, 5)),
        ("sandbox__url", (None, "http://127.0.0.1:1")),
    ],
)  # fmt: skip
def test_names_places_and_what_is_watched_do_not_separate(key: str, values: tuple[Any, Any]) -> None:
    runs = [run("a", **{key: values[0]}), run("b", 1, **{key: values[1]})]
    assert members(groups_of(runs)) == {"ctpo": ["a", "b"]}


@pytest.mark.parametrize("key", ["rollout__replay", "model__path", "data__train"])
def test_a_path_of_each_seed_does_not_separate(key: str) -> None:
    """Such as a recording, or a supervised stage of its own. With one run a seed it may be what is compared."""
    runs = [
        run(f"{preset}-{seed}", seed, objective__preset=preset, **{key: f"runs/of-{seed}"})
        for preset in ("grpo", "ctpo")
        for seed in (0, 1)
    ]
    assert members(groups_of(runs)) == {"grpo": ["grpo-0", "grpo-1"], "ctpo": ["ctpo-0", "ctpo-1"]}
    assert len(groups_of(runs[:2])) == 2


@pytest.mark.parametrize(
    ("key", "values", "labels"),
    [
        ("objective__preset", ("a", "b"), ["a", "b"]),  # runs that are named after their setting
        ("model__path", ("models/a", "models/b"), ["models/a", "models/b"]),
        ("model__path", ("runs/b/model", "runs/a/model"), ["runs/b/model", "runs/a/model"]),  # of each other
        ("model__path", ("/other/runs/a/model", "/other/runs/b/model"), ["/other/runs/a/model", "/other/runs/b/model"]),
        ("policy__optimizer__lr", (1e-6, 3e-6), ["lr=1e-06", "lr=3e-06"]),
        ("rollout__engine__extra", ({}, {"kv": True}), ["no kv", "kv=true"]),
        ("reward__function", (part(), part(box_in_thinking=False)), ["no box_in_thinking", "box_in_thinking=false"]),
        ("reward__function", (part(url="http://x"), part(url="http://y")), ["http://x", "http://y"]),
        ("objective__clip_high", (None, 0.1), ["clip_high=null", "clip_high=0.1"]),
        ("objective__function", ("losses.a:loss", "losses.b:loss"), ["losses.a:loss", "losses.b:loss"]),
        ("reward__function", ("math_verify", "m:R"), ["math_verify", "m:R"]),
        ("sft", (None, {"data": ["x"], "steps": 3}), ["sft=null", "sft=given"]),
        ("data__train", (["x/a.parquet"], ["x/b.parquet"]), ["train=[x/a.parquet]", "train=[x/b.parquet]"]),
        ("run__steps", (10, 20), ["steps=10", "steps=20"]),
    ],
)
def test_settings_separate(key: str, values: tuple[Any, Any], labels: list[str]) -> None:
    groups = groups_of([run("a", **{key: values[0]}), run("b", **{key: values[1]})])
    assert [*members(groups)] == labels
    assert [group.seeds for group in groups] == [["0"], ["0"]]


def test_a_group_of_one_run_says_which_run_it_is() -> None:
    runs = [run("quickstart"), run("grpo", objective__preset="grpo"), run("more", 1, objective__preset="gspo")]
    assert "Runs: ctpo is quickstart; grpo is grpo; gspo is more." in notes_of(groups_of(runs))
    named_alike = [run(preset, objective__preset=preset) for preset in ("ctpo", "grpo")]
    assert not any(note.startswith("Runs:") for note in notes_of(groups_of(named_alike)))
    with_seeds = [run("a"), run("b", 1), run("grpo", objective__preset="grpo")]
    assert not any(note.startswith("Runs:") for note in notes_of(groups_of(with_seeds)))


def test_the_name_of_the_run_is_not_its_setting() -> None:
    runs = [run(name, reward__function=part(judge=f"{name}")) for name in ("strict", "lenient")]
    assert [*members(groups_of(runs))] == ["strict", "lenient"]


def test_a_default_that_another_version_did_not_write_is_the_schemas() -> None:
    older = run("a", policy__skip_zero_advantage=True)
    del older.config["policy"]["skip_zero_advantage"], older.config["sandbox"]
    assert len(groups_of([older, run("b", 1)])) == 1
    assert [*members(groups_of([older, run("b", policy__skip_zero_advantage=False)]))] == [
        "skip_zero_advantage=true", "skip_zero_advantage=false",
    ]  # fmt: skip


def test_seeds_of_their_own_are_seeds() -> None:
    runs = [run(f"r{seed}", 0, own={"seed": seed}) for seed in (0, 1)]
    (group,) = groups_of(runs)
    assert group.seeds == ["0/0", "0/1"]
    followed = [run(f"r{seed}", seed, own={"seed": seed}) for seed in (0, 1)]
    assert groups_of(followed)[0].seeds == ["0", "1"]


def test_a_repeated_seed_is_said_and_is_no_other_seed() -> None:
    (group,) = groups_of([run("a"), run("b"), run("c", 1)])
    assert group.seeds == ["0", "1"]
    assert group.repeated == {"0": ["a", "b"]}
    assert "ctpo: a, b repeat seed 0. They count as one seed, by their mean." in notes_of([group])


def test_a_directory_given_twice_counts_once() -> None:
    (group,) = groups_of([run("a"), replace(run("a"), directory=Path("runs/../runs/a"))])
    assert (len(group.runs), group.label) == (1, "a")


def test_labels_have_the_keys_that_are_needed() -> None:
    lr = "policy__optimizer__lr"
    runs = [
        run("a", **{lr: 1e-6}, objective__preset="ctpo", rollout__temperature=1.0),
        run("b", **{lr: 1e-6}, objective__preset="grpo", rollout__temperature=0.5),
        run("c", **{lr: 2e-6}, objective__preset="grpo", rollout__temperature=0.5),
    ]
    groups = groups_of(runs)
    assert [*members(groups)] == ["preset=ctpo, lr=1e-06", "preset=grpo, lr=1e-06", "preset=grpo, lr=2e-06"]
    assert groups[0].settings["rollout.temperature"] == 1.0
    notes = notes_of(groups)
    assert any(note.startswith("preset=grpo, lr=1e-06 differs from preset=ctpo, lr=1e-06 in 2 keys") for note in notes)


def test_labels_name_which_section_where_two_have_the_key() -> None:
    both = [
        run("a", policy__optimizer__lr=1e-6, sft={"data": ["x"], "steps": 1, "optimizer": {"lr": 0.1}}),
        run("b", policy__optimizer__lr=2e-6, sft={"data": ["x"], "steps": 1, "optimizer": {"lr": 0.1}}),
        run("c", policy__optimizer__lr=2e-6, sft={"data": ["x"], "steps": 1, "optimizer": {"lr": 0.2}}),
    ]
    assert groups_of(both)[0].label == "sft.optimizer.lr=0.1, policy.optimizer.lr=1e-06"


def test_long_labels_are_short_and_unique() -> None:
    longest = [f"/a/very/long/path/to/a/model/{'x' * 80}/{n}/model" for n in range(2)]
    same_end = [f"/mnt/{n}/{'y' * 80}/the/same/end/of/a/path" for n in range(2)]
    for paths in (longest, same_end):
        labels = [*members(groups_of([run("a", model__path=paths[0]), run("b", model__path=paths[1])]))]
        assert len(set(labels)) == 2
    assert max(map(len, labels)) <= 100


def test_other_machines_and_code_are_said() -> None:
    commits = ["a" * 40, "a" * 40 + "+changes"]
    environments = [
        {"commit": commit, "devices": [f"GPU {n}"], "packages": {"torch": f"2.{n}"}} for n, commit in enumerate(commits)
    ]
    runs = [run(name, number, environments[number]) for number, name in enumerate("ab")]
    notes = notes_of(groups_of(runs))
    assert "Other commit: aaaaaaaa (a), aaaaaaaa with changes (b)." in notes
    assert "Other devices: [GPU 0] (a), [GPU 1] (b)." in notes
    assert "Other torch: 2.0 (a), 2.1 (b)." in notes
    assert "Code with changes that no commit has: b. Whether it was the same is unknown." in notes


def test_what_is_not_compared_is_in_the_schema() -> None:
    paths = [key.path for key in known_keys()]
    assert [key for key in NOT_COMPARED if not any(f"{path}.".startswith(f"{key}.") for path in paths)] == []
