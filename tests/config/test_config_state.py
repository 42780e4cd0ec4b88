"""Checks of what a run continues from, repeats or evaluates on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ctpo_megatron.config import Config, Job, Placement, needs_engines, rules, shares_gpus
from ctpo_megatron.plan import evaluations
from tests.config import model

Make = Callable[..., Config]


def found(config: Config) -> list[str]:
    return model.found(config, spec=None)


@pytest.fixture
def recording(config_with: Make) -> Path:
    """What a run of the small configuration leaves, four steps long."""
    config = config_with("run.name=recorded")
    dumps = config.run.directory / "trajectories"
    dumps.mkdir(parents=True)
    for step in (1, 2, 3, 4):
        (dumps / f"step_{step:06d}.jsonl").touch()
    (config.run.directory / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return config.run.directory


def test_a_recording_that_fits_is_no_problem(recording: Path, config_with: Make) -> None:
    assert found(config_with("rollout.replay=runs/recorded")) == []


def test_every_misfit_of_a_recording_is_named(recording: Path, config_with: Make) -> None:
    config = config_with("rollout.replay=runs/recorded", "run.steps=12", "run.seed=7", "rollout.samples_per_prompt=4")
    steps = ", ".join(f"step_{step:06d}.parquet" for step in (5, 6, 7, 8, 9))
    texts = found(config)
    assert len(texts) == 3
    assert f"lacks 8 of 12 steps: trajectories/{{{steps} and 3 more}}; lower run.steps" in texts[0]
    assert texts[1] == (
        "error: run.seed = 7: but rollout.replay was recorded with 0: other prompts are drawn; set it to 0, "
        "or record again"
    )
    assert texts[2].startswith("error: rollout.samples_per_prompt = 4: but rollout.replay was recorded with 8")


def test_a_recording_may_be_parquet_and_must_not_be_a_sample(recording: Path, config_with: Make) -> None:
    for path in (recording / "trajectories").glob("*.jsonl"):
        path.rename(path.with_suffix(".parquet"))
    replay = ("rollout.replay=runs/recorded", "run.steps=4")
    assert found(config_with(*replay)) == []
    (recording / "config.yaml").write_text("tracking: {trajectories: sample}")
    (text,) = found(config_with(*replay))
    assert "has a sample of its trajectories only (tracking.trajectories); record with" in text


def test_a_replay_of_itself_is_refused(recording: Path, config_with: Make) -> None:
    Path("link").symlink_to(recording, target_is_directory=True)
    for path in ("runs/recorded", "runs/../runs/recorded", "link"):
        (text,) = found(config_with(f"rollout.replay={path}", "run.name=recorded"))
        assert "is this run's own directory; choose another run.name" in text


EVALUATED = ("rollout.replay=runs/recorded", "data.eval=[data/heldout.parquet]")


def test_a_replay_says_that_it_does_not_evaluate(recording: Path, config_with: Make) -> None:
    assert found(config_with(*EVALUATED)) == [
        'warning: rollout.replay = "runs/recorded": has no answers of these weights, and eval.every: 0 starts no '
        "engine for them: nothing is evaluated; set eval.every to evaluate in the run"
    ]
    best = found(config_with(*EVALUATED, "checkpoint.keep_best=1", "checkpoint.best_metric=val/a/acc/mean@1"))
    assert any("is never computed: nothing is evaluated; set eval.every, or use reward/mean" in text for text in best)


def test_a_replay_evaluates_on_engines_where_eval_asks_for_it(
    recording: Path, config_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(*EVALUATED, "eval.every=2")
    assert found(config) == []
    assert evaluations(config) == 3 and evaluations(config_with(*EVALUATED)) == 0  # of 4 steps
    monkeypatch.setattr(rules, "is_installed", lambda name: name == "ray")
    (text,) = found(config)
    assert text == (
        "error: eval.every = 2: evaluates on engines, also next to rollout.replay, and lacks vllm; "
        "set eval.every=0, which needs no engine, or install them"
    )
    assert found(config_with("data.eval=[data/heldout.parquet]", "eval.every=2")) == []


@pytest.mark.parametrize(
    ("overrides", "engines"),
    [((), 0), (("data.eval=[x]",), 0), (("data.eval=[x]", "eval.every=2"), 1), (("rollout.replay=null",), 1)],
)
def test_gpus_are_for_the_engines_that_a_run_starts(
    config_with: Make, overrides: tuple[str, ...], engines: int
) -> None:
    config = config_with("rollout.replay=runs/recorded", *overrides)
    assert needs_engines(config) == bool(engines)
    assert len(Placement.of(config, Job(1, 1)).engines) == engines
    colocated = config_with("rollout.replay=runs/recorded", *overrides, "placement.mode=colocated")
    assert shares_gpus(colocated) == bool(engines) and not shares_gpus(config)


def test_a_checkpoint_to_load_must_be_complete_and_of_another_or_a_resumed_run(config_with: Make) -> None:
    path = Path("runs/first/checkpoints/step_000002")
    (text,) = found(config_with(f"checkpoint.load={path}", "run.name=second"))
    assert "is no complete checkpoint (no COMPLETE.json in it); give a folder such as" in text
    path.mkdir(parents=True)
    (path / "COMPLETE.json").touch()
    assert found(config_with(f"checkpoint.load={path}", "run.name=second")) == []
    assert found(config_with(f"checkpoint.load={path}", "run.resume=true", "checkpoint.every=1")) == []
    (text,) = found(config_with(f"checkpoint.load={path}"))
    assert "is a checkpoint of this very run, which would start again; add run.resume=true" in text


def test_going_back_to_an_older_checkpoint_of_the_run_is_said(config_with: Make) -> None:
    checkpoints = config_with().run.directory / "checkpoints"
    for name in ("step_000002", "step_000006", "discarded_step_000009"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "COMPLETE.json").touch()
    resumed = ("run.resume=true", "checkpoint.every=1")
    assert found(config_with(f"checkpoint.load={checkpoints}/step_000006", *resumed)) == []
    for how in ("true", "auto"):
        (text,) = found(config_with(f"checkpoint.load={checkpoints}/step_000002", *resumed, f"run.resume={how}"))
        assert text.startswith("warning: checkpoint.load") and "up to step_000006, now and at every restart" in text
    Path("link").symlink_to(checkpoints.absolute(), target_is_directory=True)
    (text,) = found(config_with("checkpoint.load=link/discarded_step_000009", *resumed))
    assert text.startswith("error: checkpoint.load") and "was discarded by this run" in text
    another = Path("runs/another/checkpoints/step_000002")
    another.mkdir(parents=True)
    (another / "COMPLETE.json").touch()
    assert found(config_with(f"checkpoint.load={another}", *resumed, "run.resume=auto")) == []
    assert found(config_with(f"checkpoint.load={checkpoints}/discarded_step_000009", "run.name=other")) == []


def test_the_best_need_a_metric_that_is_computed(config_with: Make) -> None:
    best = ("checkpoint.keep_best=1", "checkpoint.best_metric=val/toolmath/acc/mean@1", "checkpoint.every=2")
    (text,) = found(config_with(*best))
    assert text.startswith("error: checkpoint.best_metric") and "is never computed: nothing is evaluated" in text
    held_out = "data.eval=[data/heldout.parquet]"
    (text,) = found(config_with(*best, held_out, "eval.every=4"))
    assert text.startswith("warning: ") and "unknown between evaluations (eval.every: 4)" in text
    assert found(config_with(*best, held_out, "eval.every=2")) == []
    (text,) = found(config_with(*best, held_out, "eval.every=2", "checkpoint.every=auto"))  # at steps of any number
    assert text.startswith("warning: ") and "set checkpoint.every to a multiple of eval.every" in text
    assert found(config_with(*best, held_out, "eval.every=1", "checkpoint.every=auto")) == []


@pytest.mark.parametrize(
    ("recorded", "now", "expected"),
    [
        ("keep", ["uniform_groups=refill"], 'uniform_groups = "refill": but rollout.replay was recorded with \'keep'),
        ("refill", ["uniform_groups=drop"], 'uniform_groups = "drop": but rollout.replay was recorded with \'refi'),
        ("refill", ["uniform_groups=refill", "max_refills=3"], "max_refills = 3: but rollout.replay was rec"),
        ("refill", ["uniform_groups=refill"], ""),
        ("keep", ["uniform_groups=drop"], ""),
    ],
)
def test_a_replay_draws_as_the_recorded_run_did(
    config_with: Make, tmp_path: Path, recorded: str, now: list[str], expected: str
) -> None:
    dumps = tmp_path / "old" / "trajectories"
    dumps.mkdir(parents=True)
    (tmp_path / "old" / "config.yaml").write_text(f"rollout: {{uniform_groups: {recorded}, max_refills: 10}}\n")
    for step in range(1, 5):
        (dumps / f"step_{step:06d}.jsonl").touch()
    problems = found(config_with("rollout.replay=old", *(f"rollout.{key}" for key in now)))
    assert len(problems) == bool(expected) and all(expected in problem for problem in problems), problems
