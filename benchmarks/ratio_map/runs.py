"""Measures cells: the supervised stage of a task, recordings, the rate of each objective, and three runs a cell.

Everything is below one folder and made once. A repeated command resumes: it keeps finished runs, and cells with
a stored result.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.ratio_map import archive
from benchmarks.ratio_map.cells import (
    EVAL_EVERY,
    RATES,
    REGIMES,
    SEEDS,
    TASKS,
    TUNING_SEED,
    Cell,
    MapTask,
    Regime,
    cells,
)
from benchmarks.runs import ROOT, environment, train
from ctpo_megatron.report import RunData, mean_sampled_reward, summarize

RESULTS = ROOT / "benchmarks" / "results" / "ratio_map"
PREDICTIONS_FILE = "predictions.json"
BARE = (
    "sft=null",
    "checkpoint.every=0",
    "export.enabled=false",
    "tracking.report=false",
    "run.resume=auto",
)
SAMPLED = ("data.eval=[]", "eval.every=0", "eval.before_training=false", "tracking.trajectories=none")
"""Of runs whose own samples are the endpoint."""
HELD_OUT = ("eval.before_training=false", f"eval.every={EVAL_EVERY}", "eval.temperature=1.0")
"""Of runs on a recording: the samples are another's, so held-out prompts are sampled as in training."""
CUT, UNCERTAIN = "pg_update/clip/total/rate", "pg_update/clip/high/rate_of_positive_uncertain"


class RunFailedError(Exception):
    """A run of a cell ended with an error; the message names its log."""


@dataclass(frozen=True)
class Measuring:
    """Where runs are made.

    folder: of all runs. results: of cells. starts: where the start of each task is stored; None to make it here.
    Of a try: settings over those of every run, other seeds, other rates. With one rate nothing is tuned.
    """

    folder: Path
    results: Path
    starts: Path | None = None
    changed: tuple[str, ...] = ()
    seeds: Sequence[int] = SEEDS
    rates: Sequence[str] = RATES

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Return the result of a cell, after its runs. Raises RunFailedError."""
        rate, tried = self.rate(cell)
        runs = {str(seed): self._result(cell, self._trained(cell, rate, seed)) for seed in self.seeds}
        return {
            "cell": cell.name,
            "settings": [*cell.objective.settings, *cell.regime.settings, *self.changed],
            "rate": rate,
            "tuned": tried,
            "commit": commit(),
            "date": str(date.today()),
            "machine": machine(),
            "seeds": runs,
        }

    def rate(self, cell: Cell) -> tuple[str, dict[str, float]]:
        """Return the rate of the cell's objective in its regime, and the endpoint of each, on the first task."""
        if len(self.rates) == 1:
            return self.rates[0], {}
        tuned = Cell(TASKS[0], cell.regime, cell.objective)
        if stored := self._stored(tuned):
            return stored["rate"], stored["tuned"]
        tried = {rate: self._result(tuned, self._trained(tuned, rate, TUNING_SEED))["value"] for rate in self.rates}
        return max(tried, key=lambda rate: tried[rate]), tried

    def _trained(self, cell: Cell, rate: str, seed: int) -> Path:
        files = self._files(cell.task)
        start = self.start(cell.task)
        settings = [*files, f"model.path={start}", *cell.objective.settings, *cell.regime.settings]
        settings += [f"policy.optimizer.lr={rate}", f"run.steps={cell.regime.steps}", f"run.seed={seed}"]
        if cell.regime.frozen:
            held_out = f"data.eval=[{self._data(cell.task) / 'heldout.parquet'}]"
            settings += [*HELD_OUT, held_out, f"rollout.replay={self.recording(cell.task, seed)}"]
        else:
            settings += SAMPLED
        return self._run(cell.task, f"{cell.regime.name}-{cell.objective.name}-lr{rate}-seed{seed}", settings)

    def start(self, task: MapTask) -> Path:
        """Return the model that all runs of a task start from: after the supervised stage of seed 0."""
        data = self._data(task)
        if not data.exists():
            command = [sys.executable, "-m", "examples.toolmath", str(data), *task.options]
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **environment()})
        model = self.folder / task.name / archive.MODEL
        if not model.exists() and self.starts:
            archive.unpack(archive_of(task, self.starts), model.parents[1])
        if not model.exists():
            sft = [f"model.path={data / 'model'}", f"sft.data=[{data / 'sft.parquet'}]", "run.steps=0", *SAMPLED]
            self._run(task, "sft", [*self._files(task), *sft, "checkpoint.sft_every=200"], bare=BARE[1:])
        return model

    def recording(self, task: MapTask, seed: int) -> Path:
        """Return a run whose samples are all of the start model: its rate moves no weight."""
        regime = next(regime for regime in REGIMES if regime.frozen)
        settings = [*self._files(task), f"model.path={self.start(task)}", "policy.optimizer.lr=1e-12", *SAMPLED[:-1]]
        settings += [f"run.steps={regime.steps}", f"run.seed={seed}"]
        return self._run(task, f"recording-seed{seed}", settings)

    def _stored(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a cell if it is stored, with the same rates."""
        file = self.results / cell.file
        stored: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        return stored if stored and stored["tuned"].keys() == set(self.rates) else None

    def _data(self, task: MapTask) -> Path:
        return self.folder / "data" / task.name

    def _files(self, task: MapTask) -> list[str]:
        return [*(str(ROOT / file) for file in task.files), f"data.train=[{self._data(task) / 'train.parquet'}]"]

    def _run(self, task: MapTask, name: str, settings: Sequence[str], bare: Sequence[str] = BARE) -> Path:
        """Run a training to its end unless it is there; returns its directory. Raises RunFailedError."""
        root = self.folder / task.name
        root.mkdir(parents=True, exist_ok=True)
        files = [setting for setting in settings if "=" not in setting]
        given = [setting for setting in settings if "=" in setting]
        command = train(*files, *given, *bare, f"run.root={root}", f"run.name={name}", *self.changed)
        if self._is_done(root / name):
            return root / name
        print(f"  {task.name}/{name}", flush=True)
        log = root / f"{name}.log"
        with log.open("a", encoding="utf-8") as output:
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **environment()}, stdout=output, stderr=output, check=False
            )
        if done.returncode:
            raise RunFailedError(f"{task.name}/{name} ended with exit status {done.returncode}: see {log}")
        return root / name

    def _is_done(self, directory: Path) -> bool:
        """Whether a run has made all its steps, so that starting it would do nothing."""
        if not (directory / "config.yaml").exists():
            return False
        run = RunData.load(directory)
        steps = run.setting("run.steps")
        return run.last_step == steps if steps else (directory / "sft_model").exists()

    def _result(self, cell: Cell, directory: Path) -> dict[str, Any]:
        return result_of(cell.regime, RunData.load(directory))


def result_of(regime: Regime, run: RunData) -> dict[str, Any]:
    """Return what is stored of a run. Raises RunFailedError where it lacks its endpoint.

    value: the endpoint, mean of the curve. cut, uncertain: share of clipped tokens, of all and of positive ones of
    sampler p below .5, None where it was not recorded; means over the steps. seconds: of the whole run.
    """
    sampled = run.accuracy_names if regime.frozen else ["reward/mean"]
    series = run.series(sampled[0]) if sampled else None
    if series is None:
        raise RunFailedError(f"{run.directory} has no {'evaluation' if regime.frozen else 'reward'}")
    value = fmean(series.values) if regime.frozen else mean_sampled_reward(run)
    return {
        "value": value,
        "curve": {f"{step:g}": round(value, 5) for step, value in zip(series.steps, series.values, strict=True)},
        "cut": _mean(run, CUT),
        "uncertain": _mean(run, UNCERTAIN),
        "seconds": summarize(run).wall_s,
    }


def _mean(run: RunData, name: str) -> float | None:
    series = run.series(name)
    return fmean(series.values) if series else None


def measure_missing(measuring: Measuring, chosen: Iterable[Cell]) -> list[str]:
    """Measure cells without a stored result and store each; returns what failed."""
    measuring.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for cell in chosen:
        if (measuring.results / cell.file).exists():
            continue
        print(f"[map] {cell.name}", flush=True)
        try:
            found = measuring.measure(cell)
        except RunFailedError as error:
            failed.append(str(error))
            print(f"  {error}", file=sys.stderr, flush=True)
            continue
        write(measuring.results / cell.file, found)
    return failed


def archive_of(task: MapTask, starts: Path = RESULTS) -> Path:
    """Return the file with the start of a task."""
    return starts / f"{task.name}.tar.xz"


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that a diff can be read of."""
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Return the commit of the checkout, with a mark where files differ from it."""
    read = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    found = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], **read).stdout.strip()  # type: ignore[call-overload]
    status = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs"]
    return found + ("+changes" if subprocess.run(status, **read).stdout.strip() else "")  # type: ignore[call-overload]


def machine() -> str:
    """Return the processor and how many of its cores are there."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


START_S, STEP_S, UPDATE_S, EVALUATION_S, SFT_S = 40.0, 3.0, 1.5, 3.0, 160.0
"""Estimates on two cores, where nothing is measured yet. A step: results/trl-quickstart-epyc.md, half of it updates. A
try of two small steps took 32 CPU-seconds, nearly all of them the start."""


def seconds_of(regime: Regime) -> float:
    """Return the estimate of one run."""
    if regime.frozen:
        return START_S + regime.steps * UPDATE_S + regime.steps / EVAL_EVERY * EVALUATION_S
    return START_S + regime.steps * (STEP_S + (regime.passes - 1) * UPDATE_S)


def cost(chosen: Sequence[Cell], results: Path = RESULTS) -> tuple[int, float]:
    """Return the runs of the cells without a result, and their hours on two cores, by measured seconds if any are."""
    seconds = {regime.name: seconds_of(regime) for regime in REGIMES}
    for cell in cells():
        if (results / cell.file).exists():
            stored = json.loads((results / cell.file).read_text(encoding="utf-8"))["seeds"]
            seconds[cell.regime.name] = fmean(run["seconds"] for run in stored.values())
    missing = [cell for cell in chosen if not (results / cell.file).exists()]
    runs = {(cell.name, seed): seconds[cell.regime.name] for cell in missing for seed in SEEDS}
    for cell in missing:
        tuned = Cell(TASKS[0], cell.regime, cell.objective)
        runs |= {(tuned.name, f"{TUNING_SEED} at {rate}"): seconds[cell.regime.name] for rate in RATES}
        for task in {cell.task, TASKS[0]}:
            runs["sft", task.name] = SFT_S
            if cell.regime.frozen:
                seeds = SEEDS if task == cell.task else ()
                more = (TUNING_SEED,) if task == TASKS[0] else ()
                recording_s = START_S + cell.regime.steps * STEP_S
                runs |= {("recording", f"{task.name} {seed}"): recording_s for seed in (*seeds, *more)}
    return len(runs), sum(runs.values()) / 3600
