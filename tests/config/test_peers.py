"""Keys of other trainers are answered with ours, or with the reason; an unknown key hides nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ctpo_megatron import cli
from ctpo_megatron.config import Problem, load_with_sources
from ctpo_megatron.config.keys import known_paths
from ctpo_megatron.config.peers import PEERS, answer, peer_table

Refusal = Callable[..., list[str]]
ANSWERS = [
    ("rollout.num_generations=8", "unknown key; TRL's name for rollout.samples_per_prompt"),
    ("num_generations=8", "unknown key; TRL's name for rollout.samples_per_prompt"),
    ("checkpoint.save_freq=8", "unknown key; verl's name for checkpoint.every"),
    ("rollout.n=8", "unknown key; verl's name for rollout.samples_per_prompt"),
    ("data.max_response_length=8", "unknown key; verl's name for rollout.max_response_tokens"),
    ("objective.epsilon_high=.2", "unknown key; TRL's name for objective.clip_high (the same width with"),
    ("model.lora_rank=8", "no adapters are trained"),
    ("policy.ppo_epochs=2", "unknown key; verl's name for policy.passes_per_batch"),
    ("num_iterations=2", "unknown key; TRL's name for policy.passes_per_batch"),
    ("run.push_to_hub=true", "nothing is uploaded: `hf upload` takes the folder model/ of a run; remove the key"),
    (
        "actor_rollout_ref={rollout: {n: 8, mode: async}, actor: {use_kl_loss: true}}",
        "unknown key; of verl: actor_rollout_ref.rollout.n is rollout.samples_per_prompt; "
        "actor_rollout_ref.actor.use_kl_loss: there is no KL term",
    ),
    ("grpo.num_prompts_per_step=8", "unknown key; NeMo-RL's name for rollout.prompts_per_step"),
    ("rollout.n_samples_per_prompt=8", "unknown key; slime's name for rollout.samples_per_prompt"),
    ("reward_model={overlong_buffer: {len: 4}}", "unknown key; verl's name for reward.overlong_penalty ("),
]
OURS = [
    ("policy.lr=1", "did you mean policy.optimizer.lr"),
    ("policy.optimizer.beta=1", "did you mean policy.optimizer.betas"),
    ("run.name_=x", "did you mean run.name"),
    ("rolout={temperature: 1}", "did you mean rollout"),
    ("data.enable=true", "did you mean data.eval"),
    ("sandbox.format=x", "did you mean sandbox.warm"),
    ("eval.sampels=1", "did you mean eval.samples"),
]
"""Mistakes that have nothing to do with another trainer."""


@pytest.mark.parametrize(("override", "message"), [*ANSWERS, *OURS])
def test_an_unknown_key_is_answered(override: str, message: str, refusal: Refusal) -> None:
    (problem,) = refusal(override)
    assert message in problem


@pytest.mark.parametrize("peer", PEERS)
def test_every_key_of_a_table_is_answered_in_the_section_it_comes_from(peer: str, refusal: Refusal) -> None:
    """All at once, in one file: `a.b.c` as verl has it, a name alone as TRL has it, slime's without dashes."""
    rows = {name.lstrip("-").replace("-", "_"): row for name, row in peer_table(peer).keys.items()}
    ours = {path.partition(".")[0] for path in known_paths()}
    names = [name for name in rows if name.split(".")[0] not in ours]
    problems = refusal(*(f"{name}=1" for name in names if not any(other.startswith(f"{name}.") for other in names)))
    for name in names:
        found = answer(name)
        assert found is not None and (found is rows[name] or PEERS.index(peer) > 1), name
        assert any(name.partition(".")[0] in problem for problem in problems), name


NAMES = [name.replace("-", "_") for peer in PEERS for name in peer_table(peer).keys]


@pytest.mark.parametrize("name", [name for name in NAMES if "_" in name.rpartition(".")[2].strip("_")])
def test_a_key_is_known_by_its_last_name(name: str) -> None:
    last = name.rpartition(".")[2].strip("_")
    found, ours = answer(f"mine.{last}"), {path.rpartition(".")[2] for path in known_paths()}
    assert last in ours or (found is not None and (found.keys, found.note) != ((), ""))


def test_a_key_of_ours_that_lost_a_letter_is_not_taken_for_another_trainers() -> None:
    for path in known_paths():
        section, _, name = path.rpartition(".")
        for place in range(len(name)):
            mistyped = f"{section}.{name[:place]}{name[place + 1 :]}".lstrip(".")
            assert mistyped in known_paths() or answer(mistyped) is None, mistyped


def test_an_unknown_key_hides_nothing(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A length, a number of prompts, a file, the model and a key of a section with checks of its own."""
    wrong = ["data.evla=[x]", "policy.micro_batch_tokens=9", "run.resume=true", "run.overwrite=true"]
    files = ["model.path=nowhere", "data.train=[nothing.parquet]"]
    for dry in ([], ["--dry-run"]):
        assert cli.main(["train", base.name, *wrong, *files, *dry]) == 2
        error = capsys.readouterr().err
        assert error.startswith("ctpo: 5 problems in the configuration:\n  command line: data.evla = ")
        for message in ("data.eval", "micro_batch_tokens = 9", "run.resume", "nowhere", "nothing.parquet"):
            assert message in error
    assert cli.main(["doctor", base.name, *wrong, *files]) == 1
    shown = capsys.readouterr().out
    assert "data.evla" in shown and "cannot hold the longest sequence" in shown


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_an_unknown_key_alone_is_refused(dry: list[str], base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", base.name, "run.sed=1", *dry]) == 2
    assert capsys.readouterr().err.startswith("ctpo: 1 problem in the configuration:\n  command line: run.sed = 1: ")


def test_the_rest_of_a_configuration_is_as_given(base: Path) -> None:
    unknown: list[Problem] = []
    config, _ = load_with_sources(base, ["run.stepz=9", "run.steps=7", "trainer={save_freq: 3}"], unknown)
    assert (config.run.steps, [problem.key for problem in unknown]) == (7, ["run.stepz", "trainer"])
