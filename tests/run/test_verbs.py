"""Every verb after every other, on a run: what is evaluated is the newest model that exists, or the one that was named.

Trainer and engines follow a script (`scripted_run.py`). Directories, checkpoints, exports and the choices are real.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.exports import Export, checkpoint_steps, exports, record_step
from ctpo_megatron.config import Config, ConfigError
from ctpo_megatron.data import Batch
from ctpo_megatron.evaluate import find_target
from ctpo_megatron.report import write_report
from ctpo_megatron.run import RunDirectoryError
from tests.compare_runs import repeatable
from tests.engines.tiny_model import build_tiny_model
from tests.run.scripted_run import ScriptedRuns, steps_of, write_model

EVERY = (0, 2, 3, 5, "auto")
FIRST, LONGER = 5, 10
CHANGING = ("resume", "extend", "extend without export", "export", "export the oldest")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(path)
    return path


@pytest.fixture
def runs(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedRuns]:
    yield ScriptedRuns(tmp_path, model, monkeypatch)


class Verbs:
    """What a user types, for the run of one directory. every: `checkpoint.every`."""

    def __init__(self, runs: ScriptedRuns, every: int | str) -> None:
        self._runs, self._every = runs, every
        self.all: dict[str, Callable[[Path], Any]] = {
            "train": self._train_again,
            "resume": lambda run: runs.train(self.config(run.name, self._steps(run), resume=True)),
            "extend": lambda run: runs.train(self.config(run.name, LONGER, resume=True)),
            "extend without export": lambda run: runs.train(self.config(run.name, LONGER, False, resume=True)),
            "export": self._export,
            "export the oldest": lambda run: runs.export(run, "--step", str(checkpoint_steps(run)[0])),
            "eval": self._evaluate,
            "report": write_report,
        }

    def config(self, name: str, steps: int, export: bool = True, **run: Any) -> Config:
        checkpoint = {"every": self._every}
        return self._runs.config(
            name, run={"steps": steps, **run}, checkpoint=checkpoint, export={"enabled": export}, eval={"every": 0}
        )

    def _train_again(self, run: Path) -> None:
        with pytest.raises(RunDirectoryError, match="already holds a run"):
            self._runs.train(self.config(run.name, FIRST))

    def _steps(self, run: Path) -> int:
        return max(checkpoint_steps(run))

    def _export(self, run: Path) -> None:
        self._runs.export(run)
        assert steps_of(run / f"model-step_{self._steps(run):06d}") == self._steps(run)

    def _evaluate(self, run: Path) -> None:
        """The model that is judged."""
        newest = max(checkpoint_steps(run))
        exported = {steps_of(path.parent) for path in run.glob("model*/config.json")}
        if newest in exported:
            target = find_target(run, None)
            assert (steps_of(target.model), target.step) == (newest, newest) and f"step {newest}" in target.why
            return
        with pytest.raises(ConfigError, match=rf"checkpoint of step {newest} is newer .* type `ctpo export {run}`"):
            find_target(run, None)
        shutil.copytree(run, kept := run.with_name("before"))
        self._runs.export(run)
        target = find_target(run, None)
        assert (steps_of(target.model), target.step) == (newest, newest)
        shutil.rmtree(run)
        kept.rename(run)


@pytest.mark.parametrize(
    ("every", "first_ones"),
    [(2, CHANGING), *(pytest.param(every, None, marks=pytest.mark.slow) for every in (0, 2, 3, 5))],
    ids=str,
)
def test_every_verb_after_every_other(
    runs: ScriptedRuns, tmp_path: Path, every: int, first_ones: Sequence[str] | None
) -> None:
    """first_ones: those that others come after; all where None. The others leave the run as it was."""
    verbs, run, kept = Verbs(runs, every), tmp_path / "run", tmp_path / "kept"
    runs.train(verbs.config(run.name, FIRST))

    def copied(source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)

    def type_and_look(*names: str) -> None:
        verbs.all[names[-1]](run)
        longer = any(name.startswith("extend") for name in names)
        assert max(checkpoint_steps(run)) == (LONGER if longer else FIRST), names
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(LONGER + 1 if longer else FIRST + 1)), names
        assert not [*run.rglob("discarded_*")], names
        verbs.all["eval"](run)

    copied(run, trained := tmp_path / "trained")
    for first in first_ones or verbs.all:
        copied(trained, run)
        type_and_look(first)
        copied(run, kept)
        for second in verbs.all:
            copied(kept, run)
            type_and_look(first, second)
            for path in run.glob("model*/config.json"):  # one that is named is taken, whatever it is
                named = find_target(path.parent, None)
                assert (named.model, named.why) == (path.parent, "")


@pytest.mark.parametrize(("every", "ahead"), [*((every, 0) for every in EVERY), (0, 1), (3, 1)])
def test_a_run_that_is_extended_draws_what_the_longer_run_draws(
    runs: ScriptedRuns, tmp_path: Path, every: int | str, ahead: int
) -> None:
    """Order, seeds and accounts; synchronously every metric but times, too."""

    def train(name: str, *steps: int) -> list[Batch]:
        rollout = {"max_staleness": ahead}
        trained: list[Batch] = []
        for number, count in enumerate(steps):
            run = {"steps": count, "resume": number > 0}
            config = runs.config(name, run=run, checkpoint={"every": every}, rollout=rollout)
            trained += runs.train(config).trained
        return trained

    def drawn(batches: list[Batch]) -> list[Any]:
        return [[(t.prompt_id, t.sample_index, t.seed, t.reward) for t in b.trajectories] for b in batches]

    whole, parts = train("whole", LONGER), train("parts", FIRST, LONGER)
    assert drawn(parts) == drawn(whole) and len(whole) == LONGER
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    if ahead:
        assert [line["step"] for line in lines[1]] == [line["step"] for line in lines[0]]
    else:
        ours, theirs = ([repeatable(line) for line in run] for run in lines)
        assert ours == theirs


def test_exports_of_a_course_that_was_left_are_not_evaluated(runs: ScriptedRuns, tmp_path: Path) -> None:
    """A user goes back: the former model of a later step is not this run's any more."""
    run = tmp_path / "back"
    verbs = Verbs(runs, 2)
    runs.train(verbs.config(run.name, FIRST))
    runs.export(run)
    older = run / "checkpoints" / "step_000004"
    back = verbs.config(run.name, 4, False, resume=True)
    runs.train(back.model_copy(update={"checkpoint": back.checkpoint.model_copy(update={"load": str(older)})}))
    with pytest.raises(ConfigError, match="has no model in Hugging Face format"):
        find_target(run, None)
    assert [steps_of(run / f"discarded_{name}") for name in ("model", "model-step_000005")] == [FIRST, FIRST]
    runs.export(run)
    assert find_target(run, None).step == 4


def test_a_model_of_an_earlier_version_is_older_than_any_checkpoint(runs: ScriptedRuns, tmp_path: Path) -> None:
    run = tmp_path / "old"
    runs.train(Verbs(runs, 0).config(run.name, FIRST))
    (run / "model" / "ctpo_export.json").unlink()
    with pytest.raises(ConfigError, match="is of a step that it does not record"):
        find_target(run, None)
    shutil.rmtree(run / "checkpoints")
    target = find_target(run, None)
    assert (target.model, target.step) == (run / "model", None) and "does not record" in target.why


def test_a_model_has_the_step_of_its_own_weights(tmp_path: Path, model: Path) -> None:
    """Not that of the export which it was trained from."""
    source = tmp_path / "source"
    shutil.copytree(model, source)
    record_step(source, 99)
    write_model(tmp_path / "model", source, 3, recorded=3)
    write_model(tmp_path / "sft_model", source, 0, recorded=None)
    assert exports(tmp_path, "model") == [Export(tmp_path / "model", 3)]
    assert exports(tmp_path, "sft_model") == [Export(tmp_path / "sft_model", -1)]


def test_an_export_asks_for_steps_that_are_there(runs: ScriptedRuns, tmp_path: Path) -> None:
    run = tmp_path / "steps"
    runs.train(Verbs(runs, 2).config(run.name, FIRST))
    with pytest.raises(ConfigError, match="choose of the steps 4-5"):
        runs.export(run, "--step", "2")
    for source in (run / "model", run / "checkpoints" / "step_000004"):
        with pytest.raises(ConfigError, match=r"--step.*is no run directory"):
            runs.export(source, "--step", "4")
    runs.export(run, "--step", "4")
    assert steps_of(run / "model-step_000004") == 4 and find_target(run, None).step == FIRST
