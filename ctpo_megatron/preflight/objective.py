"""Checks of the objective and its groups: combinations that make no loss, no signal, or another loss than was meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ctpo_megatron.config import PRESETS, ConfigError, Problem, RejectConfig, objective_from_config
from ctpo_megatron.preflight.check import RunContext

TRUST_REGIONS = ("binary_tv", "binary_kl", "prefix_tv", "sequence_k3")
"""Clip modes that take out of the loss what is too far from the anchor."""


def check_objective(context: RunContext) -> Iterator[Problem]:
    """Advantages, the loss itself, its anchor, and what is known of the sampler's log-probs."""
    config = context.config
    yield from _advantages(context)
    yield from _loss(context)
    yield from _credit(context)
    yield from _correction(context)
    for number, reject in enumerate(config.objective.correction.reject):
        yield from _reject(f"objective.correction.reject.{number}", reject)
    yield from _sampling(context)


def _advantages(context: RunContext) -> Iterator[Problem]:
    config = context.config
    kind = config.objective.advantage.kind
    if config.rollout.samples_per_prompt == 1 and kind in ("group", "rloo"):
        message = f"gives no advantage {kind!r}: a trajectory would be compared with itself alone, and nothing learned"
        fix = "sample at least 2, or set objective.advantage.kind: mean_baseline"
        yield context.error("rollout.samples_per_prompt", message, fix)
    if config.rollout.samples_per_prompt == config.rollout.prompts_per_step == 1:
        message = "a batch of one trajectory has nothing to be compared with, and nothing is learned"
        yield context.error("rollout.prompts_per_step", message, "sample more prompts, or more samples of each")


def _loss(context: RunContext) -> Iterator[Problem]:
    config = context.config
    function = config.objective.function
    if function is not None and not function.is_path:
        fix = "write package.module:Name; for one of ours set objective.preset"
        yield Problem("objective.function", "is no import path", fix, function.name)
    try:
        objective = objective_from_config(config.objective)
    except ConfigError as refused:
        yield from refused.problems
        return
    if function is not None and objective.entropy_coef:
        message = "is of our own objectives; objective.function decides all of its loss"
        yield context.error("objective.entropy_coef", message, "remove it")
    if function is None and objective.clip_mode in TRUST_REGIONS and config.objective.anchor != "behaviour":
        message = f"makes clip_mode: {objective.clip_mode} measure from the trainer; its authors do from the sampler"
        yield context.warning("objective.anchor", message, "set behaviour")
    if config.objective.preset == "dr-grpo" and config.objective.loss_scale_factor is None:
        fix = f"set it to rollout.max_response_tokens ({config.rollout.max_response_tokens})"
        message = "is 1: the sum over a response's tokens, which dr-grpo divides by the longest response, is the loss"
        yield context.warning("objective.loss_scale_factor", message, fix)


def _credit(context: RunContext) -> Iterator[Problem]:
    objective = context.config.objective
    if objective.credit == "outcome":
        if objective.turn_ratio is not None:
            message = "has no effect with objective.credit: outcome, which knows no turns"
            yield context.error("objective.turn_ratio", message, "remove it, or set objective.credit: turn")
        return
    clip_mode = objective.clip_mode or PRESETS[objective.preset].get("clip_mode")
    if objective.function is None and clip_mode == "token_log":
        message = "gives the turns of a sequence advantages of both signs, and clip_mode: token_log needs one"
        yield context.error("objective.credit", message, "set outcome, or another preset than gmpo")
    if objective.turn_ratio == "turn-end" and objective.function is not None:
        message = "is of our own objectives; objective.function decides all of its loss"
        yield context.error("objective.turn_ratio", message, "remove it; inputs.turn has the turns")
    if objective.turn_ratio == "turn-end" and objective.anchor == "decoupled":
        message = "takes ratios to the end of a turn, and the weights of anchor: decoupled end elsewhere"
        yield context.error("objective.turn_ratio", message, "set objective.anchor: behaviour, whose ratio is exact")


def _correction(context: RunContext) -> Iterator[Problem]:
    config = context.config
    anchor, correction = config.objective.anchor, config.objective.correction
    key = "objective.correction.level"
    if anchor == "decoupled" and correction.level == "none":
        message = "is the proximal ratio times a weight, and objective.correction.level is none"
        yield context.error("objective.anchor", message, "set the level, e.g. sequence, or anchor: proximal")
    elif anchor == "proximal" and correction.level != "none":
        yield context.error(key, "multiplies the proximal ratio by a weight", "set objective.anchor: decoupled")
    elif anchor == "behaviour" and correction.level != "none":
        message = "would count twice: with anchor: behaviour the ratio itself is against the sampler"
        yield context.error(key, message, "set it to none, or objective.anchor: decoupled")
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


def _sampling(context: RunContext) -> Iterator[Problem]:
    """The sampler reports log-probs of the filtered distribution; the trainer's are of the whole vocabulary."""
    config = context.config
    objective = config.objective
    used = objective.anchor != "proximal" or objective.correction.rejects
    report = context.error if used else context.warning
    message = "the sampler's log-probs are of the filtered distribution, the trainer's are not"
    for key, off, filtered in (
        ("rollout.top_p", "1.0", config.rollout.top_p < 1),
        ("rollout.top_k", "0", config.rollout.top_k > 0),
    ):
        if filtered:
            fix = f"set {off}" + (", or objective.anchor: proximal without correction" if used else "")
            yield report(key, message, fix)


def check_groups(context: RunContext) -> Iterator[Problem]:
    """Filters with distinct names, uniform groups that mean something, a penalty within the budget."""
    config = context.config
    names = Counter(part.short_name for part in config.rollout.filters)
    for name in (name for name, count in names.items() if count > 1):
        message = f"holds {names[name]} filters named {name}, and metrics could not tell them apart"
        value = [*map(str, config.rollout.filters)]
        yield Problem("rollout.filters", message, "remove one, or give yours another name", value)
    yield from _uniform_groups(context)
    yield from _oversample(context)
    shaping, budget = config.reward.overlong_penalty, config.rollout.max_response_tokens
    if shaping is not None and shaping.buffer > budget:
        message = (
            f"is more than the budget itself (rollout.max_response_tokens: {budget}), so every response would lose"
        )
        yield context.error("reward.overlong_penalty.buffer", message, "lower it")


def _oversample(context: RunContext) -> Iterator[Problem]:
    config = context.config
    if not config.rollout.oversample:
        return
    if config.rollout.uniform_groups == "refill":
        message = "draws further prompts before it is known how many are needed, and uniform_groups: refill after it"
        yield context.error("rollout.oversample", message, "set 0, or uniform_groups: drop")
    if config.rollout.replay is not None:
        message = "is for engines; what was not waited for is not in rollout.replay"
        yield context.error("rollout.oversample", message, "set 0")


def _uniform_groups(context: RunContext) -> Iterator[Problem]:
    config = context.config
    if config.rollout.uniform_groups == "keep":
        return
    if config.rollout.samples_per_prompt == 1:
        message = "would drop everything: the rewards of a group of one are always equal"
        yield context.error("rollout.uniform_groups", message, "sample at least 2 per prompt, or set keep")
    if config.objective.advantage.kind == "mean_baseline":
        message = "would drop groups that teach: objective.advantage.kind compares them with the whole batch"
        yield context.error("rollout.uniform_groups", message, "set keep, or an advantage within the group")
