"""Runs the layouts as jobs and compares their results with the oracle."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from ctpo_megatron.config import ConfigError, Job, PolicyConfig, layout_problems, read_spec, stored_tensors
from ctpo_megatron.data import Trajectory
from ctpo_megatron.models import ModelFamily, ModelSpec
from ctpo_megatron.objective import Advantage, PolicyObjective, PositionStats, SamplerTokens, position_stats
from ctpo_megatron.verify import batch
from ctpo_megatron.verify.layouts import LAYOUTS, OBJECTIVES, LayoutCase, is_by_turn
from ctpo_megatron.verify.oracle import Oracle, Reference, SampleKey
from ctpo_sandbox import temporary

TEMPERATURE = 0.9
MICRO_BATCH_TOKENS = 512
JOB_TIMEOUT_S = 1800.0
TOLERANCE = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.1}
"""Of loss, log-probs and gradient against float64, by policy.dtype. In 16 bits the weights themselves are rounded.
There a token near a bound may be clipped otherwise, which is no rounding error: take an objective without bounds."""
POSITIONS_TOLERANCE = 1e-12
"""Of the largest sum in a column of the statistics by position: the order of the tokens differs."""
_LOG_CHARACTERS = 3000


@dataclass(frozen=True)
class LayoutResult:
    """One layout under one objective, against the oracle; `problem` is the reason for missing figures.

    loss: relative. log_probs: largest absolute difference, nats. gradient: |difference| / |gradient| over all tensors;
    worst: the largest such ratio of a single tensor, and its name.
    """

    layout: str
    objective: str
    ranks: int
    loss: float = float("nan")
    log_probs: float = float("nan")
    gradient: float = float("nan")
    worst: float = float("nan")
    worst_name: str = ""
    problem: str = ""

    def row(self) -> str:
        """Return one line of the table; missing figures are omitted."""
        names = f"{self.layout:<25}{self.objective:<21}{self.ranks:>5}"
        figures = f"{self.loss:>10.1e}{self.log_probs:>10.1e}{self.gradient:>10.1e}  {self.worst:.1e} {self.worst_name}"
        return names if self.problem else names + figures

    def passed(self, tolerance: float) -> bool:
        """Loss, log-probs and the gradient as a whole within `tolerance`."""
        return not self.problem and all(value <= tolerance for value in (self.loss, self.log_probs, self.gradient))


def unsupported_layouts(model: Path | None, family: ModelFamily | None = None) -> dict[str, str]:
    """Layouts (by name) that cannot run a model, with the reason. Raises ConfigError for what is not a model.

    model: a Hugging Face directory, of the user's `family` if given; None: the two models made here, which all layouts
    can run.
    """
    if model is None:
        return {}
    spec = read_spec(model, family)
    reasons = {name: _reason_against(layout, spec) for name, layout in LAYOUTS.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def _reason_against(layout: LayoutCase, spec: ModelSpec) -> str:
    if layout.experts != (spec.num_experts > 0):
        return f"for {'a mixture of experts' if layout.experts else 'a dense model'}"
    job = Job(layout.ranks, cuda=torch.cuda.is_available())
    found = layout_problems(PolicyConfig.model_validate(layout.policy), spec, job)
    return "; ".join(str(problem) for problem in found if problem.severity == "error")


def verify(
    model: Path | None,
    layouts: Sequence[str],
    objectives: Sequence[str],
    family: ModelFamily | None = None,
    dtype: str = "float32",
) -> Iterator[LayoutResult]:
    """Check layouts (names of `LAYOUTS` that fit) and objectives (names of `OBJECTIVES`), one after another.

    model: a Hugging Face directory small enough for float64; None makes a tiny dense one and a tiny mixture of experts.
    family: the user's, importable in the jobs; None: a built-in one. dtype: of the policy. Raises ConfigError for a
    model without weights, or with weights that do not match its config.json.
    """
    if model is not None and (problems := stored_tensors(model, read_spec(model, family))[1]):
        raise ConfigError(problems)
    disable_progress_bar()
    for experts, replays in ((False, False), (True, False), (True, True)):
        chosen = [name for name in layouts if (LAYOUTS[name].experts, LAYOUTS[name].replays) == (experts, replays)]
        if chosen:
            with temporary.folder("ctpo-verify-") as folder:
                if model is None:
                    batch.build_model(folder / "model", experts=experts)
                yield from _verify_model(folder, model or folder / "model", chosen, objectives, family, dtype)


def _verify_model(
    folder: Path, model: Path, layouts: Sequence[str], objectives: Sequence[str], family: ModelFamily | None, dtype: str
) -> Iterator[LayoutResult]:
    oracle = _prepare(folder, model, objectives, family, dtype, replays=LAYOUTS[layouts[0]].replays)
    groups: dict[int, list[str]] = defaultdict(list)
    for layout in layouts:
        groups[LAYOUTS[layout].ranks].append(layout)
    for ranks, members in sorted(groups.items()):
        for layout, problem in _run_all(folder, ranks, members):
            for objective in objectives:
                yield _check(folder, layout, objective, ranks, oracle, problem)


def _run_all(folder: Path, ranks: int, layouts: list[str]) -> Iterator[tuple[str, str]]:
    """(layout, problem) of each. When a job dies, the current layout has the problem, and the rest run in a new job."""
    while layouts:
        problem = _run_job(folder, ranks, layouts)
        finished = len(list(takewhile(lambda name: (folder / f"{name}.pt").exists(), layouts)))
        if problem or finished < len(layouts):
            finished = min(finished, len(layouts) - 1)  # a job that dies after its last layout counts as in that one
            yield from ((name, "") for name in layouts[:finished])
            yield layouts[finished], problem or "the job wrote nothing"
            layouts = layouts[finished + 1 :]
        else:
            yield from ((name, "") for name in layouts)
            layouts = []


def _prepare(
    folder: Path,
    model: Path,
    objectives: Sequence[str],
    family: ModelFamily | None = None,
    dtype: str = "float32",
    *,
    replays: bool = False,
) -> Oracle:
    spec = read_spec(model, family)
    trajectories = batch.trajectories(spec.vocab_size)
    if replays:
        batch.record_experts(trajectories, spec)
    reference = Reference(model, TEMPERATURE, family)
    with torch.no_grad():
        for index, trajectory in enumerate(trajectories):
            log_probs = reference.rows(trajectory)[0].tolist()
            trajectory.tokens["rollout_log_probs"] = [
                value + batch.shift(index, t) if sampled else 0.0
                for t, (value, sampled) in enumerate(zip(log_probs, trajectory.response_mask, strict=True))
            ]
    work: dict[str, Any] = {
        "model": str(model),
        "family": family,
        "dtype": dtype,
        "temperature": TEMPERATURE,
        "trajectories": trajectories,
        "advantages": {False: batch.advantages(), True: batch.turn_advantages()},
        "objectives": list(objectives),
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
    }
    (folder / "work.pickle").write_bytes(pickle.dumps(work))
    of_each = [
        reference.evaluate(trajectories, advantages, chosen)
        for by_turn, advantages in work["advantages"].items()
        if (chosen := {name: OBJECTIVES[name] for name in objectives if is_by_turn(name) == by_turn})
    ]
    return reduce(or_, of_each)


def _run_job(folder: Path, ranks: int, layouts: list[str]) -> str:
    """Run the layouts on `ranks` processes; the end of the output if they failed."""
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "ctpo_megatron.verify.job", str(folder), *layouts]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=JOB_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{ranks} ranks did not finish {', '.join(layouts)} within {JOB_TIMEOUT_S:g} s"
    return _reason(done.stderr) if done.returncode else ""


def _reason(log: str) -> str:
    """The last output lines of the rank that failed first, since other ranks may have waited for it."""
    of_ranks = [line.partition("]:") for line in log.splitlines() if line.startswith("[rank")]
    text = "\n".join(rest for rank, _, rest in of_ranks if rank == of_ranks[0][0]) or log.rstrip()
    if len(text) <= _LOG_CHARACTERS:
        return text
    return text[-_LOG_CHARACTERS:].partition("\n")[2]


def _check(folder: Path, layout: str, objective: str, ranks: int, oracle: Oracle, problem: str) -> LayoutResult:
    if problem:
        return LayoutResult(layout, objective, ranks, problem=problem)
    found = torch.load(folder / f"{layout}.pt", weights_only=False)
    if found["log_probs"].keys() != oracle.log_probs.keys():
        return LayoutResult(layout, objective, ranks, problem="the job did not evaluate every sequence")
    expected = oracle.gradient[objective]
    gradient = found["gradient"][objective]
    if gradient.keys() != expected.keys():
        apart = sorted(gradient.keys() ^ expected.keys())
        return LayoutResult(layout, objective, ranks, problem=f"gradients of other tensors: {', '.join(apart)[:500]}")
    work = pickle.loads((folder / "work.pickle").read_bytes())
    advantages = work["advantages"][is_by_turn(objective)]
    of_layout = _expected_positions(work["trajectories"], advantages, found["log_probs"], OBJECTIVES[objective])
    if unlike := found["positions"][objective].unlike(of_layout, POSITIONS_TOLERANCE):
        return LayoutResult(layout, objective, ranks, problem=f"statistics by position: {unlike}")
    errors = {name: _norm(gradient[name].double() - tensor) for name, tensor in expected.items()}
    sizes = {name: _norm(tensor) for name, tensor in expected.items()}
    ratios = {name: errors[name] / sizes[name] if sizes[name] else errors[name] for name in expected}
    worst = max(ratios, key=lambda name: ratios[name])
    loss = oracle.loss[objective]
    return LayoutResult(
        layout,
        objective,
        ranks,
        loss=abs(found["loss"][objective] - loss) / abs(loss),
        log_probs=max(
            float((found["log_probs"][key].double() - row).abs().max()) for key, row in oracle.log_probs.items()
        ),
        gradient=_joint_norm(errors) / _joint_norm(sizes),
        worst=ratios[worst],
        worst_name=worst,
    )


def _expected_positions(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Advantage],
    log_probs: Mapping[SampleKey, Tensor],
    objective: PolicyObjective,
) -> PositionStats:
    """Statistics by position that the log-probs of a layout, float32 `[T]`, give. The sampler's are the anchor."""

    def column(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([trajectory.tokens[name] for trajectory in trajectories]))

    lengths = [len(trajectory) for trajectory in trajectories]
    of_tokens = torch.cat([log_probs[each.prompt_id, each.sample_index] for each in trajectories])
    return position_stats(
        of_tokens,
        column("rollout_log_probs"),
        torch.from_numpy(batch.of_tokens(trajectories, advantages)),
        column("response_mask"),
        column("loss_mask"),
        objective,
        torch.tensor(np.cumsum([0, *lengths])),
        turn=column("turn"),
        sampler=SamplerTokens(column("rollout_log_probs"), column("weight_version"), None, trainer=of_tokens),
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _joint_norm(norms: dict[str, float]) -> float:
    return float(sum(value**2 for value in norms.values()) ** 0.5)
