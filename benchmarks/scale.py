"""What a job of 1, 8 and 64 GPUs waits for: the product's driver code, on pretended engines and ranks.

    PYTHONPATH=.:kernels python -m benchmarks.scale [--gpus 1 8 64] [--variants ...] [--out FOLDER]

Prompts, scheduler, scoring, batches, packing and the shares of other ranks are the product's own; their CPU time is
measured here and passes on a simulated clock (`simulated_time`). Engines and training passes take the time that
`Machine` says. docs/scale.md has the assumptions and what follows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.kernels import report
from benchmarks.scale_cases import LENGTHS, LONGEST, SAMPLES, SIZES, STEPS_OF_EPOCH, VARIANTS, Case, Machine, Size
from benchmarks.simulated_engines import Workload
from benchmarks.simulated_pool import Pool, Ray, faults
from benchmarks.simulated_time import Clock
from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.config import Config
from ctpo_megatron.data import Batch, PromptSampler
from ctpo_megatron.data.packing import split_evenly
from ctpo_megatron.objective import batch_advantages
from ctpo_megatron.policy.minibatch import checked_sequences, make_mini_batches, share_of
from ctpo_megatron.policy.parallel import Layout
from ctpo_megatron.rewards import RewardPool
from ctpo_megatron.rollouts import Rollouts, RolloutSettings, Scheduler, Scorer, buffer, rollouts, scheduler
from ctpo_megatron.run import Controller, Services
from ctpo_megatron.tracking import Phases
from ctpo_megatron.train import reinforce

GROUP_TIMEOUT_S = 100_000.0
"""Agents of 32,000 tokens wait for hours for a place in an engine's cache."""
SAMPLING, PUBLISHING, PACKING = "sample, score, assemble", "publish", "pack and share out"
ENGINE_SUMS = ("busy_s", "again_s", "preempted")


class DataOrder(scheduler.GroupOrder):
    """Groups begin in the order of the data."""

    def sorted(self, jobs: Any) -> list[Any]:
        return sorted(jobs, key=lambda job: job.request.step)


@dataclass
class Pending:
    """Scores that real processes compute, and that are there after a simulated time."""

    clock: Clock
    real: Any
    at: float

    @property
    def done(self) -> bool:
        return self.clock.monotonic() >= self.at

    def result(self) -> Any:
        self.clock.sleep(max(0.0, self.at - self.clock.now))
        return self.real.result()


class SimulatedScorer(Scorer):
    """Real scores, in simulated time."""

    def __init__(self, pool: RewardPool, clock: Clock, score_s: float) -> None:
        super().__init__(pool)
        self._clock, self._score_s = clock, score_s

    def begin(self, groups: Any) -> Any:
        return Pending(self._clock, super().begin(groups), self._clock.monotonic() + self._score_s)


@dataclass
class Trainer:
    """The ranks: rank zero packs and shares out, then all are busy for as long as `Machine` says."""

    clock: Clock
    size: Size
    config: Config
    machine: Machine
    ray: Ray
    version: int = 1
    serial_s: list[float] = field(default_factory=list)
    """From the end of the last group on its engine, or from the call, to the first pass."""
    start_mib: float = 0.0
    """Memory before the first batch."""
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def train(self, batch: Batch) -> int:
        """Tokens of the batch, once its updates are done."""
        called = self.clock.monotonic()
        with self.clock.stage(PACKING):
            distribute(batch, self.size, self.config)
        tokens = sum(map(len, batch.trajectories))
        self.began.append(self.clock.monotonic())
        self.serial_s.append(self.clock.now - (called if self.config.rollout.max_staleness else self.ray.last_done))
        self.clock.sleep(self.machine.train_s(self.size.spec, tokens, self.size.trainers))
        self.ended.append(self.clock.now)
        self.version += 1
        return tokens

    def connect(self, facts: Any) -> None: ...

    def disconnect(self) -> None: ...

    def release(self) -> None: ...

    def share_gpus(self, pool: Any) -> None: ...


def distribute(batch: Batch, size: Size, config: Config) -> None:
    """Mini-batches of rank zero, and the tokens that it would send to the other ranks."""
    one = {f"{of}_{what}": int(what == "size") for of in ("tp", "pp", "cp", "ep") for what in ("rank", "size")}
    layout = Layout(rank=0, world_size=1, dp_rank=0, dp_size=size.trainers, device=torch.device("cpu"), **one)
    advantages = batch_advantages([group.rewards for group in batch.trained], config.objective.advantage)
    sequences = checked_sequences(batch.trajectories, advantages, size.spec.vocab_size, 4)
    count = config.policy.mini_batch_prompts * SAMPLES
    make_mini_batches(
        sequences,
        advantages,
        size=count,
        config=config.policy,
        layout=layout,
        spec=size.spec,
        attention=None,
        skip_zero_advantage=True,
    )
    for start in range(0, len(sequences), count):
        chunk = sequences[start : start + count]
        for share in split_evenly(chunk, size.trainers):
            share_of([chunk[index] for index in share])


def settings(case: Case) -> Config:
    """As a job of this size is configured. It has further steps, so that engines do not run dry at the end."""
    size, variant, longest = case.size, VARIANTS[case.variant], case.longest
    rollout = {
        "prompts_per_step": size.prompts,
        "samples_per_prompt": SAMPLES,
        "oversample": int(size.prompts * variant.get("oversample", 0)),
        "max_staleness": variant.get("max_staleness", 0),
        "partial": variant.get("partial", "continue"),
        "max_response_tokens": longest,
        "engine": {"max_model_len": longest + 512, "max_num_seqs": case.seats},
        "engines": size.engines,
        "group_timeout_s": GROUP_TIMEOUT_S,
    }
    steps = case.before + case.steps + variant.get("max_staleness", 0)
    return Config(
        **{
            "run": {"name": "simulated", "steps": steps},
            "model": {"path": "."},
            "data": {"train": ["."]},
            "rollout": rollout,
            "policy": {
                "dtype": "bfloat16",
                "mini_batch_prompts": min(32, size.prompts),
                "micro_batch_tokens": longest + 512,
            },
            "placement": {"mode": "colocated" if size.shared else "disaggregated"},
        }
    )


@dataclass
class Simulated:
    """The run that `reinforce` drives: it notes when each step was over, and what it trained."""

    clock: Clock
    steps_made: int
    pool: Pool
    ended: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    trajectories: list[int] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    engines: list[dict[str, float]] = field(default_factory=list)
    """Sums over the engines, until the end of each step."""
    cpu: list[dict[str, float]] = field(default_factory=list)
    version: int = 1

    def begin(self) -> None: ...

    def begin_updates(self) -> None: ...

    def steps(self) -> Iterator[int]:
        yield from range(1, self.steps_made + 1)

    def agree_to_stop(self) -> bool:
        self.version += 1
        return False

    def finish_step(self, step: int, batch: Batch, result: int) -> None:
        self.ended.append(self.clock.monotonic())
        self.tokens.append(result)
        self.trajectories.append(len(batch.trajectories))
        self.metrics.append(batch.metrics)
        with self.clock.free():
            for engine in self.pool.engines:
                engine.take_stock()
        self.engines.append({name: sum(getattr(e, name) for e in self.pool.engines) for name in ENGINE_SUMS})
        self.cpu.append(dict(self.clock.cpu))


class Report:
    """What `Controller` tells of its phases, as stages of the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._clock.stage(PUBLISHING if name == "publish" else SAMPLING)

    def note(self, text: str) -> None: ...


def recorded(name: str) -> list[list[int]]:
    """Model tokens of the samples of each prompt: of `samples.jsonl`, which `ctpo eval` writes, or of `LENGTHS`."""
    path = LENGTHS if name == LENGTHS.name else Path(name)
    if path.suffix != ".jsonl":
        groups: list[list[int]] = json.loads(path.read_text())["groups"]
        return groups
    found: dict[str, list[int]] = {}
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        found.setdefault(sample["prompt_id"], []).append(sample["model_tokens"])
    return list(found.values())


def simulate(case: Case, machine: Machine) -> dict[str, Any]:
    """Figures of the counted steps."""
    size, variant = case.size, VARIANTS[case.variant]
    config = settings(case)
    workload = Workload(recorded(case.lengths), case.tokens, case.longest, STEPS_OF_EPOCH * size.prompts)
    clock = Clock()
    speed = machine.speed(size.spec)
    pool = Pool(config.rollout, clock, speed, workload, size.engines)
    ray = Ray(clock, pool, workload, machine.ray_get_s)
    trainer = Trainer(clock, size, config, machine, ray)
    run = Simulated(clock, case.before + case.steps, pool)
    if case.deaths_per_hour and not size.shared:
        faults(clock, pool, 3600 / case.deaths_per_hour)()
    trainer.start_mib = memory_mib()
    with clock.patched(scheduler, rollouts, buffer, ray=ray), RewardPool(config.reward) as rewards:
        engines = cast(Any, pool)
        training = Scheduler.of(engines, background=config.rollout.max_staleness > 0)
        if variant.get("order") == "data":
            training._order = DataOrder()
        scorer = SimulatedScorer(rewards, clock, machine.score_s)
        prompts = PromptSampler(workload.prompts, seed=0)
        sampled = Rollouts(RolloutSettings.of(config), training, scorer, prompts, NeverStop(), Phases())
        nothing = SimpleNamespace(end=lambda: None)
        services = Services(sampled, cast(Any, nothing), engines)
        stand_ins: Any = (trainer, services, Report(clock))
        with Controller(config, *stand_ins) as controller, clock.stage(SAMPLING), sampled:
            controller._yields = False
            reinforce(cast(Any, run), cast(Any, trainer), controller)
    return figures(case, size, trainer, run)


def figures(case: Case, size: Size, trainer: Trainer, run: Simulated) -> dict[str, Any]:
    first, last = case.before - 1, case.before + case.steps - 1
    seconds = run.ended[last] - run.ended[first]
    passes = zip(trainer.began[first + 1 :], trainer.ended[first + 1 :], strict=True)
    computing = sum(end - begin for begin, end in passes)
    engines = {name: run.engines[last][name] - run.engines[first][name] for name in ENGINE_SUMS}
    worked = computing * size.trainers + engines["busy_s"]
    cpu = {name: (run.cpu[last][name] - run.cpu[first].get(name, 0.0)) / case.steps for name in run.cpu[last] if name}
    metrics = run.metrics[first + 1 :]
    return {
        **asdict(case),
        "trainers": size.trainers,
        "tokens a step": statistics.fmean(run.tokens[first + 1 :]),
        "seconds a step": seconds / case.steps,
        "samples/s": sum(run.trajectories[first + 1 :]) / seconds,
        "trainer computes": computing / seconds,
        "engines work": engines["busy_s"] / (seconds * size.engines),
        "computed again": engines["again_s"] / (seconds * size.engines),
        "preempted a step": engines["preempted"] / case.steps,
        "serial s": statistics.fmean(trainer.serial_s[first + 1 :]),
        "GPUs wait": 1 - worked / (seconds * size.gpus),
        "staleness": statistics.fmean(each.get("rollout/staleness_mean", 0.0) for each in metrics),
        "engine restarts": sum(each["rollout/engine_restarts"] for each in metrics),
        "cpu": cpu,
        "start MiB": trainer.start_mib,
        "peak MiB": memory_mib(),
    }


def memory_mib() -> float:
    """Most memory of this process until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(case: Case, machine: Machine) -> dict[str, Any]:
    """Simulate a case in a process of its own, whose peak memory is that of the case.

    A fork has imported everything. Raises RuntimeError when it fails, after it has said why.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        theirs.send(simulate(case, machine))
        os._exit(0)  # a simulated thread that waits for ever is no reason to stay

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError as error:
        raise RuntimeError(f"no figures of {case}; its process has said why") from error
    finally:
        process.join()
    at = {"machine": asdict(machine), "commit": report.environment("cpu")["commit"], "load": os.getloadavg()[0]}
    return found | at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--tokens", type=float, default=3_300, help="model tokens of a trajectory, mean")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens at which a trajectory is cut")
    parser.add_argument("--lengths", default=LENGTHS.name, help="samples.jsonl of `ctpo eval MODEL --samples 8`")
    parser.add_argument("--deaths-per-hour", type=float, default=0.0, help="engines that die, of the whole job")
    parser.add_argument("--trainers", type=int, default=0, help="GPUs that train; 0: a quarter, or the only one")
    parser.add_argument("--seats", type=int, default=256, help="rollout.engine.max_num_seqs")
    parser.add_argument("--steps", type=int, default=4, help="counted, after an epoch")
    for name, value in asdict(Machine()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, help="see Machine")
    parser.add_argument("--out", type=Path, help="folder for scale.json and scale.md; adds to the cases that it has")
    options = parser.parse_args()
    machine = Machine(**{name: getattr(options, name) for name in asdict(Machine())})
    same = {name: getattr(options, name) for name in asdict(Case(1, "", 0.0)) if hasattr(options, name)}
    for gpus in options.gpus:
        for variant in options.variants:
            if SIZES[gpus].shared and "max_staleness" in VARIANTS[variant]:
                continue  # engines and trainer take turns
            row = in_a_process(Case(**same | {"gpus": gpus, "variant": variant}), machine)
            print(json.dumps(row), flush=True)
            if options.out:
                add(row, options.out)


def add(row: Mapping[str, Any], folder: Path) -> None:
    """Put a case into the folder's result files, in place of the same one of an earlier call."""
    path = folder / "scale.json"
    former = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = sorted([*(each for each in former if which(each) != which(row)), row], key=which)
    folder.mkdir(parents=True, exist_ok=True)
    about = report.environment("cpu")
    path.write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
    path.with_suffix(".md").write_text(written(rows, about) + "\n")


def which(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a case from others, in the order of the table."""
    machine = [row["machine"][name] for name in asdict(Machine())]
    named = [row[name] for name in ("lengths", "tokens", "longest", "trainers", "seats", "steps", "deaths_per_hour")]
    return (row["gpus"], *machine, *named, list(VARIANTS).index(row["variant"]))


def written(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Tables of what was simulated."""
    header = ("GPUs (train)", "mean tokens", "deaths/h", "variant", "step, s", "serial, s", "CPU-s of rank zero")
    header += ("trainer computes", "engines work", "of it again", "preempted", "GPUs wait", "samples/s", "staleness")
    header += ("restarts", "driver, MiB", "commit")
    table = [
        (
            f"{row['gpus']} ({row['trainers']})",
            f"{row['tokens']:g}",
            f"{row['deaths_per_hour']:g}",
            row["variant"] + "".join(f", {name} {value:g}" for name, value in unusual(row).items()),
            f"{row['seconds a step']:.1f}",
            f"{row['serial s']:.2f} ({row['serial s'] / row['seconds a step']:.1%})",
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["cpu"].items()),
            f"{row['trainer computes']:.0%}",
            f"{row['engines work']:.0%}",
            f"{row['computed again']:.0%}",
            f"{row['preempted a step']:.0f}",
            f"{row['GPUs wait']:.0%}",
            f"{row['samples/s']:.2f}",
            f"{row['staleness']:.2f}",
            f"{row['engine restarts']:.0f}",
            f"{row['peak MiB']:.0f} ({row['start MiB']:.0f} before the first batch)",
            str(row["commit"])[:8],
        )
        for row in rows
    ]
    assumed = ", ".join(f"{name} {value:g}" for name, value in asdict(Machine()).items())
    return "\n\n".join(
        (
            "# A job in simulated time",
            "Serial: from the end of the last group, or from the call where sampling is ahead, to the first pass; CPU "
            "time of rank zero. Counted steps come after an epoch. Other programs used the machine, too (`load` in "
            "scale.json). Assumed of the machine, unless a row says otherwise; never measured: "
            f"{assumed}.",
            report.markdown(header, table),
            report.describe(about),
        )
    )


def unusual(row: Mapping[str, Any]) -> dict[str, float]:
    """What a row assumes that is no default, beside the columns of the table."""
    usual = {**asdict(Machine()), "seats": 256, "longest": LONGEST}
    found = row["machine"] | {"seats": row["seats"], "longest": row["longest"]}
    return {name: value for name, value in found.items() if value != usual[name]}


if __name__ == "__main__":
    main()
