"""The pages for users of other trainers: every key and metric of ours that they name is there.

What they and the glossary say of a key of TRL or verl is what `config/peers.py` says in messages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ctpo_megatron.config import ObjectiveConfig, load_config, resolved_objective
from ctpo_megatron.config.keys import known_keys, known_paths
from ctpo_megatron.config.peers import TRL, VERL, PeerKey, answer
from ctpo_megatron.preflight.check import RunContext, failed, run_checks
from ctpo_megatron.preflight.objective import check_objective

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("from_verl.md", "from_trl.md", "from_nemo_rl_and_slime.md")
LEAST_ROWS = 25
NUMBERS = "The same word, other numbers"
DEFAULTS = {
    "from_trl.md": "grpo: token ratio, window (0.8, 1.2) of r, no dual bound, mean over tokens, decoupled anchor, "
    "sequence weights up to 3, rejects sequence_sum outside k1 (-1.0986, inf)",
    "from_verl.md": "grpo: token ratio, window (0.8, 1.2) of r, dual 3, mean over tokens",
}
"""What a job with the defaults of another trainer optimises."""


def section(page: str, heading: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def cells(page: str, heading: str) -> Iterator[list[list[str]]]:
    """Of each row of the tables under a heading, what its cells name; without values, such as `: refill`."""
    for row in re.findall(r"^\|(.+)\|$", section(page, heading), re.MULTILINE):
        yield [[name.partition(":")[0] for name in re.findall(r"`([^`]+)`", cell)] for cell in row.split("|")]


def named(page: str, heading: str) -> Iterator[str]:
    """What the first column of the table under a heading names."""
    for first, *_ in cells(page, heading):
        yield from first


@pytest.mark.parametrize("page", PAGES)
def test_our_keys_are_in_the_schema(page: str) -> None:
    keys = {key.path for key in known_keys()}
    sections = {path.rpartition(".")[0] for path in keys}
    found = list(named(page, "Configuration"))
    assert len(found) >= LEAST_ROWS
    assert [name for name in found if name not in keys | sections] == []


@pytest.mark.parametrize("page", PAGES)
def test_our_metrics_are_in_the_reference(page: str) -> None:
    reference = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    found = list(named(page, "Metrics"))
    assert len(found) >= 8
    assert [name for name in found if f"`{name}`" not in reference] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_version_that_was_read_is_named(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8").partition("\n## ")[0]
    assert re.search(r"\d+\.\d+\.\d", text)


@pytest.mark.parametrize("page", DEFAULTS)
def test_our_defaults_are_those_of_the_schema(page: str) -> None:
    defaults = {key.path: key.default for key in known_keys()}
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", section(page, NUMBERS), re.MULTILINE)
    given = [code.partition(": ") for row in rows for code in re.findall(r"`([^`]+: [^`]+)`", row)]
    assert len(given) >= 7
    assert {key: defaults[key] for key, _, _ in given} == {key: yaml.safe_load(value) for key, _, value in given}


@pytest.mark.parametrize("page", DEFAULTS)
def test_the_defaults_of_the_other_trainer_are_what_the_page_says(page: str, tmp_path: Path) -> None:
    """As far as a configuration says it: the objective in numbers, and how many optimizer steps a batch has."""
    (block,) = re.findall(r"```yaml\n(.*?)```", section(page, NUMBERS), re.DOTALL)
    (tmp_path / "peer.yaml").write_text(f"defaults: {DOCS.parent / 'configs' / 'no_tools.yaml'}\n{block}")
    config = load_config(tmp_path / "peer.yaml")
    assert resolved_objective(config.objective)["summary"] == f"Objective: {DEFAULTS[page]}"
    assert failed(run_checks([check_objective], RunContext(config))) == []
    updates = config.rollout.prompts_per_step / config.policy.mini_batch_prompts
    assert updates == (1 if page == "from_trl.md" else 1024 / 256)
    assert (config.policy.dtype, config.rollout.max_response_tokens) == ("bfloat16", 512)


def test_presets_with_a_name_of_trl_have_the_numbers_that_the_page_says() -> None:
    text = section("from_trl.md", NUMBERS)
    lines = {name: resolved_objective(ObjectiveConfig(preset=name)) for name in ("dapo", "grpo", "dr-grpo", "cispo")}
    assert "`dapo`: r between .8 and 1.28, dual bound 3" in text
    assert (lines["dapo"]["window"], lines["dapo"]["dual"]) == ({"low": 0.8, "high": 1.28}, 3.0)
    assert "`grpo`: dual bound 3" in text and lines["grpo"]["dual"] == 3.0
    assert "1 unless set; advantages are not divided" in text and "`cispo`: r up to 5" in text
    assert lines["dr-grpo"]["loss_scale_factor"] == 1.0 and not lines["dr-grpo"]["advantage"]["normalize_std"]
    assert lines["cispo"]["window"]["high"] == 5.0


COLUMNS = {"verl": 1, "TRL": 2}
"""Of a table of the glossary."""


def told() -> dict[str, set[str]]:
    """A key of TRL or verl -> our keys in the rows that name it."""
    found = defaultdict[str, set[str]](set)
    rows = [*cells("glossary.md", "Names elsewhere")]
    theirs = [(row[0], row[column]) for row in rows for column in COLUMNS.values()]
    theirs += [(row[0], row[1]) for page in ("from_trl.md", "from_verl.md") for row in cells(page, "Configuration")]
    known = {*known_paths()}
    for ours, names in theirs:
        keys = known.intersection(ours)
        for name in names:
            if keys and name not in {"", "GRPOTrainer", *known}:
                found[name] |= keys
    return found


def test_messages_say_of_a_key_what_the_pages_say() -> None:
    rows = told()
    assert len(rows) > 100
    assert [name for name in rows if answer(name) is None] == []
    named = defaultdict[PeerKey | None, set[str]](set)
    for name, keys in rows.items():
        named[answer(name)] |= keys
    assert [found for found, keys in named.items() if found and not (found.keys and keys >= {*found.keys})] == []


def test_what_the_pages_say_is_not_here_has_a_reason() -> None:
    for name in ("beta", "reward.reward_model", "peft_config", "critic"):
        found = answer(name)
        assert found is not None and not found.keys and found.note, name


def test_every_entry_names_keys_of_ours_or_a_reason() -> None:
    for name in (*TRL, *VERL):
        found = answer(name)
        assert found is not None and (found.keys or found.note)
        assert {*found.keys} <= {*known_paths()}, name
