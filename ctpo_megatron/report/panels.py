"""The figures of a run: which metrics each shows, and its caption. Pure data."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ctpo_megatron.report.run_data import ACCURACY, RunData, Series
from ctpo_megatron.report.trajectories.ratio import ratio_name
from ctpo_megatron.tracking import PHASES

OVERVIEW = ("reward", "accuracy", "tool", "clip", "is_ratio", "time")
"""Panels of figures/overview.png, in reading order."""


@dataclass(frozen=True)
class Line:
    """One metric as a curve. `over_ranks` combines the values of all ranks, `<r>` in the name of the metric."""

    metric: str
    label: str
    colour: str = "blue"
    dashed: bool = False
    over_ranks: Callable[[Iterable[float]], float] | None = None

    def series(self, run: RunData) -> Series | None:
        """Its points, or None when the run has no finite value."""
        if self.over_ranks is None:
            return run.series(self.metric)
        found = {step: self.over_ranks(values.values()) for step, values in run.by_rank(self.metric).items()}
        return Series(list(found), list(found.values())) if found else None


@dataclass(frozen=True)
class Panel:
    """One figure. `limits` fixes ends of the y axis (None: fitted); `reference` is (config key, label) of a line.

    smooth: whether many points are drawn as moving means, with the points beneath.
    """

    name: str
    title: str
    ylabel: str
    caption: str
    lines: tuple[Line, ...] = ()
    kind: Literal["lines", "phases"] = "lines"
    smooth: bool = False
    band: tuple[str, str] | None = None
    reference: tuple[str, str] | None = None
    limits: tuple[float | None, float | None] | None = None
    log: bool = False
    xlabel: str = "RL step"

    @property
    def compared(self) -> tuple[Line, ...]:
        """Its metrics for a comparison of runs, one at a time."""
        ends = () if self.band is None else (Line(self.band[0], "smallest"), Line(self.band[1], "largest"))
        return (*self.lines, *ends)

    def has_data(self, run: RunData) -> bool:
        """Whether any of its curves has a value (on a log axis: a positive one)."""
        found = (line.series(run) for line in self.lines)
        return any(series is not None and (not self.log or max(series.values) > 0) for series in found)

    def absent(self, run: RunData) -> list[str]:
        """Metrics it shows that the run does not have."""
        return [line.metric for line in self.lines if line.series(run) is None]


_COLOURS = ("blue", "orange", "green", "purple", "cyan", "red")
_SHARE = (0.0, 1.0)
_FROM_ZERO = (0.0, None)


def panels(run: RunData) -> list[Panel]:
    """All figures, in the order of the report."""
    reward, tool, signal, clip, *others = _PANELS
    rewards = [reward, _accuracy(run), tool, signal, *_known(run, _NO_BOX, _turn_rewards(run), _reward_parts(run))]
    policy = [
        clip,
        *_known(run, _CLIP_BY_SIGN, _CLIP_OF_UNCERTAIN),
        _ratio(run),
        *_known(run, _quantiles(run), _ESS, _ENTROPY),
    ]
    rest = _known(run, _STALENESS, _SANDBOX, _SFT_THROUGHPUT, _SFT_MFU, _utilization(run))
    return [*rewards, *policy, *others, *rest, _memory(run)]


def compared_panels(runs: Sequence[RunData]) -> list[Panel]:
    """The figures of several runs: each with the metrics that any of them has, by step."""
    found: dict[str, Panel] = {}
    for run in runs:
        for panel in panels(run):
            known = found.get(panel.name, panel)
            lines = {line.metric: line for line in (*known.lines, *panel.lines)}
            found[panel.name] = replace(known, lines=tuple(lines.values()))
    if "memory" in found:
        found["memory"] = replace(found["memory"], lines=(_LARGEST_RANK,))
    if len({ratio_name(run) for run in runs}) > 1 and "is_ratio" in found:
        caption = f"{_RATIO_OF} The runs have objectives with different ratios; each shows its own."
        found["is_ratio"] = replace(found["is_ratio"], ylabel="ratio r", caption=caption)
    return list(found.values())


def _known(run: RunData, *optional: Panel) -> list[Panel]:
    """The panels of which the run has a metric."""
    return [panel for panel in optional if {*run.names} & {line.metric for line in panel.lines}]


_RATIO_OF = "Ratio of the updated policy to the anchor, over the loss tokens of the step's last update; 1: unchanged."


def _ratio(run: RunData) -> Panel:
    name = ratio_name(run)
    lines = (Line("pg_update/is_ratio/mean", "mean"),)
    ends = ("pg_update/is_ratio/min", "pg_update/is_ratio/max")
    caption = (
        f"{_RATIO_OF} {run.setting('objective.preset', 'This objective')}: log r is {name.words}. Band: all tokens."
    )
    return Panel("is_ratio", "Importance ratio", name.symbol, caption, lines, band=ends, log=True)


def _quantiles(run: RunData) -> Panel:
    colours = ("grey", "blue", "cyan", "green", "orange", "red")
    shares = zip((25, 50, 75, 90, 95, 99), colours, strict=True)
    lines = tuple(Line(f"pg_update/is_ratio/p{share}", f"{share} %", colour) for share, colour in shares)
    caption = "Quantiles of the same ratio: how many tokens are near the ends of the band."
    title = "Quantiles of the ratio"
    return Panel("ratio_quantiles", title, ratio_name(run).symbol, caption, lines, log=True)


def _coloured(names: Iterable[str], label: Callable[[str], str]) -> tuple[Line, ...]:
    """A line for each metric, with the label that is made of its name."""
    return tuple(
        Line(name, label(name), colour) for name, colour in zip(names, itertools.cycle(_COLOURS), strict=False)
    )


def _accuracy(run: RunData) -> Panel:
    names = run.accuracy_names or ["val/<data_source>/acc/mean@1"]
    return Panel(
        "accuracy",
        "Held-out accuracy",
        "accuracy",
        "Share of held-out prompts answered correctly, before, during and after training.",
        _coloured(names, lambda name: match["source"] if (match := ACCURACY.fullmatch(name)) else name),
        limits=_SHARE,
    )


def _reward_parts(run: RunData) -> Panel:
    """Components and metrics of users' reward functions; they return none if they return a number alone."""
    known = {*_REWARD, *_of_turns(run)}
    names = [name for name in run.names if name.startswith("reward/") and name not in known]
    lines = _coloured(names, lambda name: name.removeprefix("reward/"))
    caption = "Components and metrics of the reward functions: means over the trajectories of a step, or counts."
    return Panel("reward_parts", "Parts of the reward", "mean or count", caption, lines)


def _turn_rewards(run: RunData) -> Panel:
    lines = _coloured(_of_turns(run), lambda name: f"turn {name.rpartition('/')[2]}")
    caption = "Mean of what each turn earned, over the trajectories of the step that have it."
    return Panel("turn_rewards", "Reward of each turn", "mean reward", caption, lines)


def _of_turns(run: RunData) -> list[str]:
    names = (name for name in run.names if name.startswith("reward/turn/"))
    return sorted(names, key=lambda name: int(name.rpartition("/")[2]))


_REWARD = frozenset(
    f"reward/{name}"
    for name in (
        *("mean", "std", "groups_mixed", "groups_unjudged", "no_verdict", "no_box"),
        *("timeouts", "failures", "crashes", "nones", "not_finite"),
    )
)
"""Reward metrics with figures of their own, or that every run has with any reward function."""


def _utilization(run: RunData) -> Panel:
    """Of the phases whose peak is known; on a CPU of none."""
    lines = tuple(line for line in _by_phase("mfu") if line.metric in run.names)
    caption = "Model FLOP/s over the peak of the devices that the phase runs on."
    return Panel("mfu", "Model FLOPs utilization", "MFU", caption, lines, limits=_FROM_ZERO)


def _memory(run: RunData) -> Panel:
    """One curve per rank for few ranks, else their spread."""
    ranks = sorted(set().union(*run.by_rank(RANK_PEAK).values()))
    lines: tuple[Line, ...] = (_LARGEST_RANK,)
    if 0 < len(ranks) <= len(_COLOURS):
        names = [RANK_PEAK.replace("<r>", str(rank)) for rank in ranks]
        lines = _coloured(names, lambda name: f"rank {name.split('_')[1]}")
    elif ranks:
        median = Line(RANK_PEAK, "median", "green", over_ranks=statistics.median)
        lines = (_LARGEST_RANK, median, Line(RANK_PEAK, "smallest", "grey", over_ranks=min))
    return Panel(
        "memory",
        "Trainer memory",
        "MiB",
        "Most memory that a trainer rank has held since it began: tensors on a GPU, resident memory on a CPU.",
        lines,
        limits=_FROM_ZERO,
    )


RANK_PEAK = "memory/rank_<r>_peak_mib"
_LARGEST_RANK = Line("memory/trainer_peak_mib", "largest of the ranks")


def _by_phase(unit: str) -> tuple[Line, ...]:
    colours = {"rollout": "blue", "old_log_probs": "cyan", "update": "green"}  # as in the figure of times
    return tuple(Line(f"throughput/{phase}_{unit}", phase, colour) for phase, colour in colours.items())


_PANELS = (
    Panel(
        "reward",
        "Reward",
        "mean reward",
        "Mean reward of the trajectories sampled in each step, before they are trained on; "
        "the tile above is the mean of the last five steps.",
        (Line("reward/mean", "reward"),),
        limits=_SHARE,
    ),
    Panel(
        "tool",
        "Tool use",
        "share",
        "Trajectories with at least one successful tool call, and the share of calls that failed.",
        (
            Line("rollout/tool_use", "trajectories using the tool"),
            Line("rollout/tool_error_rate", "failed calls", "red"),
        ),
        limits=_SHARE,
    ),
    Panel(
        "signal",
        "Learning signal",
        "share",
        "Only groups with right and wrong answers teach anything. A trajectory cut off by its budget earns nothing.",
        (Line("reward/groups_mixed", "groups with signal", "green"), Line("rollout/truncated", "cut off", "grey")),
        limits=_SHARE,
    ),
    Panel(
        "clip",
        "Clipped tokens",
        "share of tokens",
        "Tokens whose gradient the clip sets to zero, by the bound that did it.",
        (
            Line("pg_update/clip/total/rate", "total", "ink"),
            Line("pg_update/clip/high/rate", "high", "blue"),
            Line("pg_update/clip/low/rate", "low", "orange"),
            Line("pg_update/clip/dual/rate", "dual", "purple"),
        ),
        limits=_FROM_ZERO,
    ),
    Panel(
        "mismatch",
        "Sampler against trainer",
        "|Δ log p|, nats",
        "Difference between the log-probabilities of the sampler and of the trainer for the same tokens and weights.",
        (Line("mismatch/log_prob_abs_max", "largest", "orange"), Line("mismatch/log_prob_abs_mean", "mean", "blue")),
        reference=("rollout.mismatch_limit", "limit"),
        log=True,
    ),
    Panel(
        "grad_norm",
        "Gradient norm",
        "L2 norm",
        "Global gradient norm before clipping.",
        (Line("actor/grad_norm", "gradient norm"),),
        reference=("policy.optimizer.clip_grad", "clipped above"),
        limits=_FROM_ZERO,
    ),
    Panel(
        "length",
        "Response length",
        "tokens per trajectory",
        "Tokens after the prompt, and the part written by the model.",
        (
            Line("rollout/response_length_mean", "response", "grey"),
            Line("rollout/model_tokens_mean", "written by the model"),
        ),
        limits=_FROM_ZERO,
    ),
    Panel(
        "time",
        "Time per step",
        "seconds",
        "Wall time of each step by phase. Phases that overlap may add up to more than the step.",
        tuple(Line(f"time/{phase}", phase) for phase in PHASES),
        kind="phases",
    ),
    Panel(
        "throughput",
        "Throughput",
        "tokens per second",
        "Tokens over the wall time of each phase (rollout: those that the model wrote), and all over the whole step.",
        (*_by_phase("tokens_per_s"), Line("tokens/per_second", "step", "ink", dashed=True)),
        log=True,
    ),
    Panel(
        "flops",
        "Model FLOPs",
        "TFLOP/s",
        "Model TFLOPs per second of each phase: what the mathematics needs, without padding and recomputation.",
        _by_phase("model_tflops_per_s"),
        log=True,
    ),
    Panel(
        "packing",
        "Packing",
        "share",
        "Tokens among the rows that attention computes, and time of the update outside of passes and optimizer.",
        (
            Line("packing/useful_token_fraction", "useful tokens", "green"),
            Line("time/update_overhead_fraction", "overhead of the update", "red"),
        ),
        limits=_SHARE,
    ),
    Panel(
        "sft",
        "SFT loss",
        "nats per token",
        "Supervised fine-tuning that teaches the format before reinforcement learning begins.",
        (Line("sft/loss", "loss", "purple"),),
        smooth=True,
        limits=_FROM_ZERO,
        xlabel="SFT step",
    ),
)

_NO_BOX = Panel(
    "no_box",
    "Answers without a box",
    "trajectories per step",
    "Trajectories that end without \\boxed{}: whatever they say, they earn nothing.",
    (Line("reward/no_box", "no boxed answer", "orange"),),
    limits=_FROM_ZERO,
)
_CLIP_BY_SIGN = Panel(
    "clip_by_sign",
    "Clipped tokens by sign",
    "share of tokens of the sign",
    "What each bound clips of the tokens it can clip: the upper one of positive, the others of negative advantage.",
    (
        Line("pg_update/clip/high/rate_of_positive", "high, of positive", "blue"),
        Line("pg_update/clip/low/rate_of_negative", "low, of negative", "orange"),
        Line("pg_update/clip/dual/rate_of_negative", "dual, of negative", "purple"),
    ),
    limits=_FROM_ZERO,
)
_CLIP_OF_UNCERTAIN = Panel(
    "clip_of_uncertain",
    "Clipped uncertain tokens",
    "share of uncertain tokens of the sign",
    "The same of the tokens that decide: those that the sampler gave a probability below one half.",
    (
        Line("pg_update/clip/high/rate_of_positive_uncertain", "high, of positive", "blue"),
        Line("pg_update/clip/low/rate_of_negative_uncertain", "low, of negative", "orange"),
        Line("pg_update/clip/dual/rate_of_negative_uncertain", "dual, of negative", "purple"),
    ),
    limits=_FROM_ZERO,
)
_ESS = Panel(
    "ess",
    "Effective sample size",
    "share of tokens",
    "How many tokens would count as much if each had the weight exp S_t of its prefix; 1: all.",
    (Line("pg_update/prefix_ratio/ess", "effective share", "green"),),
    limits=_SHARE,
)
_ENTROPY = Panel(
    "entropy",
    "Entropy",
    "nats",
    "Mean entropy of the policy over the model tokens in the passes, before the updates of the step.",
    (Line("actor/entropy", "entropy", "purple"),),
    limits=_FROM_ZERO,
)
_STALENESS = Panel(
    "staleness",
    "Staleness",
    "weight versions",
    "How far the weights that sampled a token are behind those that it trains.",
    (Line("rollout/staleness_max", "largest", "orange"), Line("rollout/staleness_mean", "mean")),
    limits=_FROM_ZERO,
)
_SANDBOX = Panel(
    "sandbox",
    "Tool calls",
    "seconds per call",
    "Mean time that a call ran, and that it waited, travelled and was tried again.",
    (Line("sandbox/exec_s", "running", "green"), Line("sandbox/queue_s", "waiting", "grey")),
    limits=_FROM_ZERO,
)


def _of_sft(name: str, title: str, ylabel: str, caption: str, line: Line) -> Panel:
    return Panel(name, title, ylabel, caption, (line,), smooth=True, limits=_FROM_ZERO, xlabel="SFT step")


_SFT_THROUGHPUT = _of_sft(
    "sft_throughput",
    "SFT throughput",
    "tokens per second",
    "Tokens of a supervised step over its wall time, packing included.",
    Line("sft/tokens_per_s", "SFT throughput", "purple"),
)
_SFT_MFU = _of_sft(
    "sft_mfu",
    "SFT utilization",
    "MFU",
    "Model FLOP/s of the supervised steps over the peak of the trainer's devices.",
    Line("sft/mfu", "SFT utilization", "purple"),
)
