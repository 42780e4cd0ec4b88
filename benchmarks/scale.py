"""What a job of 1, 8 and 64 GPUs waits for: the product's driver code, on pretended engines and ranks.

    PYTHONPATH=.:kernels python -m benchmarks.scale [--gpus 1 8 64] [--tokens 3300] [--faults-per-hour 0]

Prompts, scheduler, scoring, batches, packing and the shares of other ranks are the product's own; their CPU time is
measured here and passes on a simulated clock (`simulated_time`). Engines and training passes take the time that
`Machine` says. docs/scale.md has the assumptions and what follows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks.kernels import report
from benchmarks.simulated_engines import Pool, Ray, Speed, Workload, faults
from benchmarks.simulated_time import Clock
from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.config import Config
from ctpo_megatron.data import Batch, PromptSampler
from ctpo_megatron.data.packing import split_evenly
from ctpo_megatron.models import FAMILIES, ModelSpec
from ctpo_megatron.objective import batch_advantages
from ctpo_megatron.policy.minibatch import checked_sequences, make_mini_batches, share_of
from ctpo_megatron.policy.parallel import Layout
from ctpo_megatron.rewards import RewardPool
from ctpo_megatron.rollouts import Rollouts, RolloutSettings, Scheduler, Scorer, buffer, rollouts, scheduler
from ctpo_megatron.run import Controller, Services
from ctpo_megatron.tracking import Phases
from ctpo_megatron.train import reinforce

LENGTHS = Path(__file__).with_name("scale_lengths.json")
SAMPLES, LONGEST = 8, 16_000
EPOCHS_BEFORE, STEPS = 1, 4
"""Whole epochs that are not counted, after which the scheduler knows a length of every prompt, and counted steps."""
STEPS_OF_EPOCH = 2
SAMPLING, PUBLISHING, PACKING = "sample, score, assemble", "publish", "pack and share out"


@dataclass(frozen=True)
class Machine:
    """What is assumed of one GPU and of Ray; none of it was measured on a GPU.

    flops, bytes_s: dense bfloat16 FLOP/s and memory bytes/s of an H100 (its data sheet). mfu: of the trainer's passes.
    decode: share of the bytes/s that decoding reaches. prefill: MFU of prefill. weights_bytes_s: one update, all
    engines at once. ray_get_s: of the driver, for a group's answer. score_s: until a group is scored.
    """

    flops: float = 989e12
    bytes_s: float = 3.35e12
    mfu: float = 0.3
    decode: float = 0.5
    prefill: float = 0.4
    launch_s: float = 0.004
    weights_bytes_s: float = 10e9
    ray_get_s: float = 0.0005
    score_s: float = 0.05

    def speed(self, model: ModelSpec, context: float) -> Speed:
        """Of an engine of one GPU whose sequences have `context` tokens on average."""
        parameters = parameter_count(model)
        cached = 2 * model.num_layers * model.num_key_value_heads * model.head_dim * 2
        return Speed(
            step_s=self.launch_s + 2 * parameters / (self.decode * self.bytes_s),
            sequence_s=cached * context / (self.decode * self.bytes_s),
            prefill_token_s=2 * parameters / (self.prefill * self.flops),
            update_s=2 * parameters / self.weights_bytes_s,
        )

    def train_s(self, model: ModelSpec, tokens: int, gpus: int) -> float:
        """Old log-probs and updates: four forward passes' worth of FLOPs, without attention's own."""
        return 8 * parameter_count(model) * tokens / (gpus * self.mfu * self.flops)


QWEN3 = FAMILIES["Qwen3ForCausalLM"]
SMALL = ModelSpec(QWEN3, 28, 1024, 16, 8, 128, 3072, 40960, 151_936)
LARGE = ModelSpec(QWEN3, 36, 2560, 32, 8, 128, 9728, 40960, 151_936)


def parameter_count(model: ModelSpec) -> int:
    """Of a tied Qwen3."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * layer + model.vocab_size * model.hidden_size


@dataclass(frozen=True)
class Size:
    """A job. prompts: of a step. shared: engines and trainer take turns on the same GPUs."""

    gpus: int
    model: str
    prompts: int
    shared: bool = False

    @property
    def trainers(self) -> int:
        return self.gpus if self.shared else self.gpus // 2

    @property
    def engines(self) -> int:
        return self.gpus if self.shared else self.gpus - self.trainers

    @property
    def spec(self) -> ModelSpec:
        return {"0.6B": SMALL, "4B": LARGE}[self.model]


SIZES = {1: Size(1, "0.6B", 32, shared=True), 8: Size(8, "4B", 128), 64: Size(64, "4B", 512)}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "order of the data": {"order": "data"},
    "oversample 1/8": {"oversample": 1 / 8},
    "max_staleness 1": {"max_staleness": 1},
    "max_staleness 1, partial finish": {"max_staleness": 1, "partial": "finish"},
    "max_staleness 2": {"max_staleness": 2},
}


@dataclass(frozen=True)
class Case:
    """What one process simulates."""

    gpus: int
    variant: str
    tokens: float
    longest: int = LONGEST
    deaths_per_hour: float = 0.0
    lengths: str = str(LENGTHS)


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
    machine: Machine
    ray: Ray
    ahead: bool
    version: int = 1
    serial_s: list[float] = field(default_factory=list)
    """From the end of the last group on its engine, or from the call, to the first pass."""
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def train(self, batch: Batch) -> int:
        """Tokens of the batch, once its updates are done."""
        called = self.clock.monotonic()
        with self.clock.stage(PACKING):
            distribute(batch, self.size)
        tokens = sum(map(len, batch.trajectories))
        self.began.append(self.clock.monotonic())
        self.serial_s.append(self.clock.now - (called if self.ahead else self.ray.last_done))
        self.clock.sleep(self.machine.train_s(self.size.spec, tokens, self.size.trainers))
        self.ended.append(self.clock.now)
        self.version += 1
        return tokens

    def connect(self, facts: Any) -> None: ...

    def disconnect(self) -> None: ...

    def release(self) -> None: ...

    def share_gpus(self, pool: Any) -> None: ...


def distribute(batch: Batch, size: Size) -> None:
    """Mini-batches of rank zero, and the tokens that it would send to the other ranks."""
    one = {f"{of}_{what}": int(what == "size") for of in ("tp", "pp", "cp", "ep") for what in ("rank", "size")}
    layout = Layout(rank=0, world_size=1, dp_rank=0, dp_size=size.trainers, device=torch.device("cpu"), **one)
    config = settings(size, {})
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
        padded_attention=False,
        skip_zero_advantage=True,
    )
    for start in range(0, len(sequences), count):
        chunk = sequences[start : start + count]
        for share in split_evenly(chunk, size.trainers):
            share_of([chunk[index] for index in share])


def settings(size: Size, variant: Mapping[str, Any], longest: int = LONGEST) -> Config:
    """As a job of this size is configured."""
    rollout = {
        "prompts_per_step": size.prompts,
        "samples_per_prompt": SAMPLES,
        "oversample": int(size.prompts * variant.get("oversample", 0)),
        "max_staleness": variant.get("max_staleness", 0),
        "partial": variant.get("partial", "continue"),
        "max_response_tokens": longest,
        "engine": {"max_model_len": longest + 512, "max_num_seqs": 256},
        "engines": size.engines,
    }
    steps = EPOCHS_BEFORE * STEPS_OF_EPOCH + STEPS
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
    config: Config
    pool: Pool
    ended: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    trajectories: list[int] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    cpu: list[dict[str, float]] = field(default_factory=list)
    version: int = 1

    def begin(self) -> None: ...

    def steps(self) -> Iterator[int]:
        yield from range(1, self.config.run.steps + 1)

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
        self.busy_s.append(sum(engine.busy_s for engine in self.pool.engines))
        self.cpu.append(dict(self.clock.cpu))


class Report:
    """What `Controller` tells of its phases, as stages of the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._clock.stage(PUBLISHING if name == "publish" else SAMPLING)

    def note(self, text: str) -> None: ...


def recorded(path: Path) -> list[list[int]]:
    """Model tokens of the samples of each prompt: of `samples.jsonl`, which `ctpo eval` writes, or of `LENGTHS`."""
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
    size, variant = SIZES[case.gpus], VARIANTS[case.variant]
    config = settings(size, variant, case.longest)
    workload = Workload(recorded(Path(case.lengths)), case.tokens, case.longest, STEPS_OF_EPOCH * size.prompts)
    clock = Clock()
    speed = machine.speed(size.spec, case.tokens / 2)
    pool = Pool(config.rollout, clock, speed, workload, size.engines)
    ray = Ray(clock, pool, workload, machine.ray_get_s)
    trainer, run = Trainer(clock, size, machine, ray, config.rollout.max_staleness > 0), Simulated(clock, config, pool)
    if case.deaths_per_hour:
        faults(clock, pool, 3600 / case.deaths_per_hour)()
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
    first = EPOCHS_BEFORE * STEPS_OF_EPOCH
    began, over = run.ended[first - 1], run.ended[-1]
    seconds = over - began
    computing = sum(end - begin for begin, end in zip(trainer.began[first:], trainer.ended[first:], strict=True))
    sampling = run.busy_s[-1] - run.busy_s[first - 1]
    worked = computing * size.trainers + sampling
    cpu = {name: (run.cpu[-1][name] - run.cpu[first - 1].get(name, 0.0)) / STEPS for name in run.cpu[-1] if name}
    metrics = run.metrics[first:]
    return {
        **asdict(case),
        "tokens a step": statistics.fmean(run.tokens[first:]),
        "seconds a step": seconds / STEPS,
        "samples/s": sum(run.trajectories[first:]) / seconds,
        "trainer computes": computing / seconds,
        "engines decode": sampling / (seconds * size.engines),
        "serial s": statistics.fmean(trainer.serial_s[first:]),
        "GPUs wait": 1 - worked / (seconds * size.gpus),
        "staleness": statistics.fmean(each.get("rollout/staleness_mean", 0.0) for each in metrics),
        "engine restarts": sum(each["rollout/engine_restarts"] for each in metrics),
        "cpu": cpu,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(case: Case, machine: Machine) -> dict[str, Any]:
    """Simulate a case in a process of its own, whose peak memory is that of the case."""
    command = [sys.executable, "-m", "benchmarks.scale", "--alone", json.dumps([asdict(case), asdict(machine)])]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--tokens", type=float, default=3_300, help="model tokens of a trajectory, mean")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens at which a trajectory is cut")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="samples.jsonl of `ctpo eval MODEL --samples 8`")
    parser.add_argument("--deaths-per-hour", type=float, default=0.0, help="engines that die, of the whole job")
    for name, value in asdict(Machine()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=value, help="see Machine")
    parser.add_argument("--alone", help="simulate this case here and print it as JSON")
    parser.add_argument("--out", type=Path, help="folder for scale.json and scale.md")
    options = parser.parse_args()
    if options.alone:
        case, machine = json.loads(options.alone)
        print(json.dumps(simulate(Case(**case), Machine(**machine))))
        os._exit(0)  # a simulated thread that waits for ever is no reason to stay
    machine = Machine(**{name: getattr(options, name) for name in asdict(Machine())})
    rows = []
    for gpus in options.gpus:
        for variant in options.variants:
            if SIZES[gpus].shared and "max_staleness" in variant:
                continue  # engines and trainer take turns
            case = Case(gpus, variant, options.tokens, options.longest, options.deaths_per_hour, str(options.lengths))
            rows.append(in_a_process(case, machine))
            print(json.dumps(rows[-1]), flush=True)
    text = written(rows, machine, report.environment("cpu"))
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        about = {"environment": report.environment("cpu"), "machine": asdict(machine), "rows": rows}
        (options.out / "scale.json").write_text(json.dumps(about, indent=1) + "\n")
        (options.out / "scale.md").write_text(text + "\n")


def written(rows: Sequence[Mapping[str, Any]], machine: Machine, about: Mapping[str, Any]) -> str:
    """Tables of what was simulated."""
    first = {row["gpus"]: row["samples/s"] for row in reversed(rows)}
    header = ("GPUs", "variant", "step, s", "serial, s", "CPU-s of rank zero", "trainer computes", "engines decode")
    header += ("GPUs wait", "samples/s", "to the first", "staleness", "driver, MiB")
    table = [
        (
            str(row["gpus"]),
            row["variant"],
            f"{row['seconds a step']:.1f}",
            f"{row['serial s']:.2f} ({row['serial s'] / row['seconds a step']:.1%})",
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["cpu"].items()),
            f"{row['trainer computes']:.0%}",
            f"{row['engines decode']:.0%}",
            f"{row['GPUs wait']:.0%}",
            f"{row['samples/s']:.1f}",
            f"{row['samples/s'] / first[row['gpus']]:.2f}",
            f"{row['staleness']:.2f}",
            f"{row['peak MiB']:.0f}",
        )
        for row in rows
    ]
    assumed = ", ".join(f"{name} {value:g}" for name, value in asdict(machine).items())
    return "\n\n".join(
        (
            "# A job in simulated time",
            f"Mean of {STEPS} steps after {EPOCHS_BEFORE * STEPS_OF_EPOCH}. Serial: from the end of the last group to "
            "the first pass, CPU time of rank zero. Assumed of the machine, and not measured on any: " + assumed + ".",
            report.markdown(header, table),
            report.describe(about),
        )
    )


if __name__ == "__main__":
    main()
