"""Checks of the objective: combinations that make no loss, no signal, or another loss than was meant."""

from __future__ import annotations

from collections.abc import Iterator

from ctpo_megatron.config.objective import objective_from_config
from ctpo_megatron.config.objective_schema import RejectConfig
from ctpo_megatron.config.problems import ConfigError, Problem, error, warning
from ctpo_megatron.config.schema import Config


def check_objective(config: Config) -> Iterator[Problem]:
    """Advantages, the loss itself, its anchor, and what is known of the sampler's log-probs."""
    yield from _advantages(config)
    yield from _loss(config)
    yield from _correction(config)
    for number, reject in enumerate(config.objective.correction.reject):
        yield from _reject(f"objective.correction.reject.{number}", reject)
    yield from _sampling(config)


def _advantages(config: Config) -> Iterator[Problem]:
    kind = config.objective.advantage.kind
    if config.rollout.samples_per_prompt == 1 and kind in ("group", "rloo"):
        message = f"gives no advantage {kind!r}: a trajectory would be compared with itself alone, and nothing learned"
        fix = "sample at least 2, or set objective.advantage.kind: mean_baseline"
        yield error(config, "rollout.samples_per_prompt", message, fix)
    if config.rollout.samples_per_prompt == config.rollout.prompts_per_step == 1:
        message = "a batch of one trajectory has nothing to be compared with, and nothing is learned"
        yield error(config, "rollout.prompts_per_step", message, "sample more prompts, or more samples of each")


def _loss(config: Config) -> Iterator[Problem]:
    if config.objective.function is not None:
        yield from _objective_function(config)
    try:
        objective = objective_from_config(config.objective)
    except ConfigError as refused:
        yield from refused.problems
        return
    if config.policy.context_parallel_size > 1 and objective.whole_sequences and not objective.on_kernels:
        message = f"with clip_mode: {objective.clip_mode} needs whole sequences; a context-parallel rank holds pieces"
        key = "objective.ratio_mode" if objective.ratio_mode != "token" else "objective.loss_agg_mode"
        yield error(config, key, message, "set policy.context_parallel_size: 1, or take preset cispo as it is")
    if config.objective.preset == "dr-grpo" and config.objective.loss_scale_factor is None:
        fix = f"set it to rollout.max_response_tokens ({config.rollout.max_response_tokens})"
        message = "is 1: the sum over a response's tokens, which dr-grpo divides by the longest response, is the loss"
        yield warning(config, "objective.loss_scale_factor", message, fix)


def _correction(config: Config) -> Iterator[Problem]:
    anchor, correction = config.objective.anchor, config.objective.correction
    key = "objective.correction.level"
    if anchor == "decoupled" and correction.level == "none":
        message = "is the proximal ratio times a weight, and objective.correction.level is none"
        yield error(config, "objective.anchor", message, "set the level, e.g. sequence, or anchor: proximal")
    elif anchor == "proximal" and correction.level != "none":
        yield error(config, key, "multiplies the proximal ratio by a weight", "set objective.anchor: decoupled")
    elif anchor == "behaviour" and correction.level != "none":
        message = "would count twice: with anchor: behaviour the ratio itself is against the sampler"
        yield error(config, key, message, "set it to none, or objective.anchor: decoupled")
    named = [(reject.stat, reject.over) for reject in correction.reject]
    for stat, over in sorted({pair for pair in named if named.count(pair) > 1}):
        message = f"{stat} over {over} is there twice"
        yield Problem("objective.correction.reject", message, "keep the narrower one of the two")


def _reject(key: str, reject: RejectConfig) -> Iterator[Problem]:
    if reject.low is None and reject.high is None:
        yield Problem(key, "has no bound, so nothing leaves", "give low, high or both")
    if reject.stat == "k1":
        if reject.over == "sequence_max":
            yield Problem(f"{key}.over", "k1 has a sign: its largest says nothing", "use k2 or k3", reject.over)
        if (reject.low is not None and reject.low > 0) or (reject.high is not None and reject.high < 0):
            bounds = f"low {reject.low}, high {reject.high}"
            message = f"the bounds ({bounds}) of k1 are nats, not ratios: a token without any difference would leave"
            yield Problem(key, message, "write logarithms, e.g. -0.69 where the sampler is half as sure as the trainer")
        return
    if reject.low is not None:
        yield Problem(f"{key}.low", f"{reject.stat} is never negative and 0 is best", "remove it", reject.low)
    if reject.high is not None and reject.high <= 0:
        yield Problem(f"{key}.high", "must be positive: 0 is no difference at all", "", reject.high)


def _objective_function(config: Config) -> Iterator[Problem]:
    key, name = "objective.function", str(config.objective.function)
    if ":" not in name:
        yield Problem(key, "is no import path", "write package.module:Name; for one of ours set objective.preset", name)
    if config.policy.context_parallel_size > 1:
        message = "is given whole sequences, and a rank of a context-parallel group holds pieces of them"
        yield Problem(key, message, "set policy.context_parallel_size: 1", name)


def _sampling(config: Config) -> Iterator[Problem]:
    """The sampler reports log-probs of the filtered distribution; the trainer's are of the whole vocabulary."""
    objective = config.objective
    used = objective.anchor != "proximal" or objective.correction.rejects
    report = error if used else warning
    message = "the sampler's log-probs are of the filtered distribution, the trainer's are not"
    for key, off, filtered in (
        ("rollout.top_p", "1.0", config.rollout.top_p < 1),
        ("rollout.top_k", "0", config.rollout.top_k > 0),
    ):
        if filtered:
            fix = f"set {off}" + (", or objective.anchor: proximal without correction" if report is error else "")
            yield report(config, key, message, fix)
