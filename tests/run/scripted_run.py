"""`ctpo train` and `ctpo export` with a trainer and engines that follow a script; all else is what a user's run has.

The weights of the trainer are one number, the RL steps that have made them: so every checkpoint and every export
shows of which step it is.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ctpo_megatron import engines, export, train
from ctpo_megatron.cli import export as export_verb
from ctpo_megatron.config import Config
from ctpo_megatron.data import Batch, Prompt, PromptSampler
from ctpo_megatron.policy import Layout, TrainResult, checkpoint_files, write_directory
from ctpo_megatron.rollouts import Evaluation, EventLoop, GroupSampler, Rollouts
from ctpo_megatron.run import Services
from tests.rollouts.scripted import ScriptedEngines, ScriptedScorer
from tests.tracking.synthetic_run import make_config

PROMPTS = [Prompt(f"p{n}", "test", (), str(n), (1, 2, n + 3)) for n in range(50)]
ONE_RANK = Layout(*(0, 1) * 6, torch.device("cpu"))
WEIGHTS = "weights"


class Stop(threading.Event):
    """A stop signal that is never set."""


def write_model(target: Path, source: Path, steps: int, recorded: int | None) -> None:
    """Weights that `steps` steps have made."""
    write_directory(iter([("steps", torch.tensor([steps]))]), source, target, ONE_RANK, step=recorded)


def steps_of(model: Path) -> int:
    """The steps that have made the weights of an exported model, whatever its name and its record say."""
    return int(load_file(model / "model.safetensors")["steps"])


class ScriptedTrainer:
    """A `TrainerGroup` of one rank. trained: the batches of its steps."""

    def __init__(self, config: Config) -> None:
        self.config, self.layout, self.version = config, ONE_RANK, 1
        self.trained: list[Batch] = []

    def __getattr__(self, name: str) -> Any:
        assert name in (
            "build",
            "prepare_rl",
            "release",
            "disconnect",
            "stop_agreed",
            "finish_save",
        )
        return lambda *_, **__: None

    def settle(self, _before: object) -> Config:
        return self.config

    def dump_stacks(self, *_: object, **__: object) -> None:
        """Nothing stands still."""

    def stop_deferred(self) -> Any:
        return nullcontext()

    def train(self, batch: Batch) -> TrainResult:
        self.trained.append(batch)
        self.version += 1
        return TrainResult({"actor/entropy": 1.0 / self.version}, {})

    def save(
        self, directory: Path, step: int, settings: Any, *, state: dict[str, Any], score: float | None, attached: Any
    ) -> None:
        aside = checkpoint_files.begin(directory, step)
        (aside / WEIGHTS).write_text(str(self.version - 1))
        for name, content in attached.items():
            (aside / name).write_bytes(content())
        files = checkpoint_files.digests(aside, [WEIGHTS, *attached])
        marker = checkpoint_files.Marker(step, score, json.loads(json.dumps(state)), files, settings={})
        checkpoint_files.publish(aside, marker, keep_last=settings.keep_last, keep_best=settings.keep_best)

    def load(self, checkpoint: Path, _steps: int) -> dict[str, Any]:
        state = checkpoint_files.read_checkpoint_marker(checkpoint).run
        self.version = int((checkpoint / WEIGHTS).read_text()) + 1
        assert self.version == state["weights_version"]
        return state

    def export(self, directory: Path, step: int | None = None) -> None:
        write_model(directory, Path(self.config.model.path), self.version - 1, step)


class ScriptedExporter:
    """The `Trainer` of `ctpo export`."""

    def __init__(self, _policy: object, _layout: object, source: Path, **_: object) -> None:
        self._source, self._steps = source, 0

    def load_weights(self, checkpoint: Path) -> dict[str, Any]:
        self._steps = int((checkpoint / WEIGHTS).read_text())
        return checkpoint_files.read_checkpoint_marker(checkpoint).run

    def export(self, target: Path, _template: str | None, step: int | None) -> None:
        write_model(target, self._source, self._steps, step)


class ScriptedRuns:
    """Runs below `root`. model: of tokenizer and configuration."""

    def __init__(self, root: Path, model: Path, patch: Any) -> None:
        self.root, self._model = root, model
        patch.setattr(train, "start_services", self._services)
        patch.setitem(vars(engines), "yield_to_engines", lambda: None)  # it would slow down what tests come after
        patch.setattr(export, "Trainer", ScriptedExporter)
        patch.setattr(export, "init_distributed", lambda *_, **__: ONE_RANK)
        patch.setattr(export, "destroy_distributed", lambda: None)

    def config(self, name: str, **sections: Any) -> Config:
        settings: dict[str, Any] = {
            "model": {"path": str(self._model)},
            "data": {"train": ["train.parquet"]},
            "policy": {"mini_batch_prompts": 2},
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "tools": [], "max_turns": 1},
            "tracking": {"live": "off", "trackers": [], "report": False, "trajectories": "none"},
        }
        for key, values in sections.items():
            settings[key] = settings.get(key, {}) | values
        return make_config(self.root, name, **settings)

    def train(self, config: Config) -> ScriptedTrainer:
        trainer: Any = ScriptedTrainer(config)
        stop: Any = Stop()
        assert train.run_stages(config, trainer, stop) == 0
        return trainer

    def export(self, run: Path, *options: str) -> None:
        parser = argparse.ArgumentParser()
        export_verb.add_arguments(parser)
        assert export_verb.run(parser.parse_args([str(run), *options])) == 0

    @contextmanager
    def _services(self, config: Config, _directory: Path, phases: Any, *_: Any) -> Iterator[Services]:
        scorer, sampler = ScriptedScorer(), GroupSampler(ScriptedEngines(), config.rollout)
        prompts = PromptSampler(PROMPTS, seed=0)
        settings = {"steps": config.run.steps, "mini_batch_prompts": config.policy.mini_batch_prompts}
        with EventLoop() as loop:
            evaluation = Evaluation(config.eval, loop, sampler, scorer, [], Stop(), phases)
            with Rollouts(config.rollout, loop, sampler, scorer, prompts, Stop(), phases, **settings) as rollouts:
                yield Services(rollouts, evaluation)
