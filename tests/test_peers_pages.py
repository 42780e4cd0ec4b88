"""The page for users of other trainers, and the reference of their keys, whose tables are `config/peer_tables`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron.config import Job, ObjectiveConfig, failed, load_config, resolved_objective
from ctpo_megatron.config.keys import known_keys, known_paths
from ctpo_megatron.config.peers import NO_DEFAULT, PEER_TABLES, PEERS, answer, peer_table
from ctpo_megatron.config.policy_rules import check_objective
from docs.site.peers import peer_pages
from tests import peers

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "coming_from.md"
NAMES = DOCS / "reference" / "names.md"
DEFAULTS = {
    "TRL": "dapo-trl: token ratio, window (0.8, 1.2) of r, no dual bound, mean over tokens, advantages over "
    "std + 0.0001, decoupled anchor, sequence weights up to 3, rejects sequence_sum outside k1 (-1.0986, inf)",
    "verl": "grpo-verl: token ratio, window (0.8, 1.2) of r, dual 3, mean over tokens",
}
"""What a job with the defaults of another trainer optimises."""


def section(heading: str, page: Path = PAGE) -> str:
    return page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def named(heading: str) -> Iterator[str]:
    """What the first column of the table under a heading of `NAMES` names."""
    for first in re.findall(r"^\| ([^|]+) \|", section(heading, NAMES), re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", first)


@pytest.mark.parametrize("peer", ["TRL", "verl", "NeMo-RL and slime"])
def test_our_metrics_are_in_the_reference(peer: str) -> None:
    reference = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    found = list(named(f"Metrics of {peer}"))
    assert len(found) >= 8
    assert [name for name in found if f"`{name}`" not in reference] == []


def test_the_versions_that_were_read_are_named() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    for name in PEERS:
        (version,) = re.findall(r"\d+\.\d+\.\d", peer_table(name).read)
        assert f"{peer_table(name).peer} {version}" in text


@pytest.mark.parametrize("peer", DEFAULTS)
def test_our_defaults_are_those_of_the_schema(peer: str) -> None:
    defaults = {key.path: key.default for key in known_keys()}
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", section(f"The same word in {peer}"), re.MULTILINE)
    given = [code.partition(": ") for row in rows for code in re.findall(r"`([^`]+: [^`]+)`", row)]
    assert len(given) >= 7
    assert {key: defaults[key] for key, _, _ in given} == {key: yaml.safe_load(value) for key, _, value in given}


@pytest.mark.parametrize("peer", DEFAULTS)
def test_the_defaults_of_the_other_trainer_are_what_the_page_says(peer: str, tmp_path: Path) -> None:
    """As far as a configuration says it: the objective in numbers, and how many optimizer steps a batch has."""
    (block,) = re.findall(r"```yaml\n(.*?)```", section(f"The same word in {peer}"), re.DOTALL)
    (tmp_path / "peer.yaml").write_text(f"defaults: {DOCS.parent / 'configs' / 'no_tools.yaml'}\n{block}")
    config = load_config(tmp_path / "peer.yaml")
    assert resolved_objective(config.objective)["summary"] == f"Objective: {DEFAULTS[peer]}"
    assert failed(check_objective(config, None, Job(1))) == []
    updates = config.rollout.prompts_per_step / config.policy.mini_batch_prompts
    assert updates == (1 if peer == "TRL" else 1024 / 256)
    assert (config.policy.dtype, config.rollout.max_response_tokens) == ("bfloat16", 512)


def test_presets_with_a_name_of_trl_have_the_numbers_that_the_page_says() -> None:
    text = section("The same word in TRL")
    lines = {name: resolved_objective(ObjectiveConfig(preset=name)) for name in ("dapo", "grpo", "dr-grpo", "cispo")}
    assert "`dapo`: r between .8 and 1.28, dual bound 3" in text
    assert (lines["dapo"]["window"], lines["dapo"]["dual"]) == ({"low": 0.8, "high": 1.28}, 3.0)
    assert "`grpo`: dual bound 3" in text and lines["grpo"]["dual"] == 3.0
    assert "1 unless set; advantages are not divided" in text and "`cispo`: r up to 5" in text
    assert lines["dr-grpo"]["loss_scale_factor"] == 1.0 and not lines["dr-grpo"]["advantage"]["normalize_std"]
    assert lines["cispo"]["window"]["high"] == 5.0
    rows = re.findall(r"^\| `loss_type: (\w+)`.*\| `preset: ([\w-]+)`", text, re.MULTILINE)
    table = peer_table("trl").keys["loss_type"].values
    assert len(rows) == 4
    assert dict(rows) == {name: table[name]["objective.preset"] for name, _ in rows}


@pytest.mark.parametrize("peer", DEFAULTS)
def test_the_whole_job_of_a_page_is_complete(peer: str, tmp_path: Path) -> None:
    """It is loaded as it stands, and has the numbers of the other trainer's job beside it."""
    theirs, ours = re.findall(r"```(?:python|bash|yaml)\n(.*?)```", section(f"A job of {peer}"), re.DOTALL)
    (tmp_path / "job.yaml").write_text(ours)
    config = load_config(tmp_path / "job.yaml")
    assert len(ours.splitlines()) <= 14 and len(theirs.splitlines()) <= 25
    assert failed(check_objective(config, None, Job(config.placement.trainer_gpus or 1))) == []
    assert f"={config.run.steps}" in theirs and config.run.name == "mine"
    longest = config.rollout.max_response_tokens
    assert re.search(rf"(max_response_length|max_completion_length)={longest}\b", theirs)
    if peer == "TRL":
        assert config.rollout.prompts_per_step * config.rollout.samples_per_prompt == 8 * 8
        assert config.policy.mini_batch_prompts == config.rollout.prompts_per_step


def test_the_tables_of_the_pages_are_what_the_data_says() -> None:
    assert {page: (DOCS / page).read_text(encoding="utf-8") for page in peer_pages()} == peer_pages(), "make reference"


@pytest.mark.parametrize("name", PEERS)
def test_every_key_and_value_of_ours_in_a_table_is_valid(name: str, tmp_path: Path) -> None:
    """A value that means the same, and the other trainer's default of a key that means the same."""
    required = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["t"]}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**required, "reward": {"overlong_penalty": {"buffer": 1}}}))
    paths, given = {*known_paths()}, defaultdict[str, list[Any]](list)
    for key in peer_table(name).keys.values():
        assert key.keys or key.note, key.name
        assert {*key.keys} <= paths, key.name
        for settings in key.values.values():
            for ours, value in settings.items():
                given[ours].append(value)
        if key.verdict == "same" and not key.values and key.default not in (None, NO_DEFAULT):
            given[key.keys[0]].append(key.default)
    assert len(given) > 15
    for ours, values in given.items():
        for value in values:
            load_config(tmp_path / "base.yaml", [f"{ours}={json.dumps(value)}"])


@pytest.mark.parametrize("name", PEERS)
def test_a_table_is_written_as_the_program_writes_it(name: str) -> None:
    file = PEER_TABLES / f"{name}.yaml"
    words = {"default", "of", "here", "values", "note", "reason"}
    rows = yaml.safe_load(file.read_text(encoding="utf-8"))["keys"]
    assert [key for key, row in rows.items() if row.keys() - words or ("here" in row) == ("reason" in row)] == []
    assert file.read_text(encoding="utf-8") == peers.text(name), "run: python -m tests.peers --write"


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("name", ["trl", "verl"])
def test_names_and_defaults_are_those_of_the_wheel(name: str, tmp_path: Path) -> None:
    wheel = peers.download(name, tmp_path)
    if wheel is None:
        pytest.skip("no package registry answers")
    assert [*peers.differences(name, peers.defaults(name, wheel))] == []


def test_what_the_pages_say_is_not_here_has_a_reason() -> None:
    for name in ("beta", "reward.reward_model", "peft_config", "critic"):
        found = answer(name)
        assert found is not None and not found.keys and found.note, name
