"""Checks of what happens to the sampled groups before they are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ctpo_megatron.config.problems import Problem, error, warning
from ctpo_megatron.config.schema import Config


def check_groups(config: Config) -> Iterator[Problem]:
    """Filters that can be told apart, uniform groups that mean something, a penalty within the budget."""
    names = Counter(part.short_name for part in config.rollout.filters)
    for name in (name for name, count in names.items() if count > 1):
        message = f"holds {names[name]} filters named {name}, and metrics could not tell them apart"
        value = [*map(str, config.rollout.filters)]
        yield Problem("rollout.filters", message, "remove one, or give yours another name", value)
    yield from _uniform_groups(config)
    yield from _oversample(config)
    shaping, budget = config.reward.overlong_penalty, config.rollout.max_response_tokens
    if shaping is not None and shaping.buffer > budget:
        message = (
            f"is more than the budget itself (rollout.max_response_tokens: {budget}), so every response would lose"
        )
        yield error(config, "reward.overlong_penalty.buffer", message, "lower it")


def check_prompts(config: Config, count: int | None) -> Iterator[Problem]:
    """Enough training prompts for a batch, given how many there are (None: that is not known)."""
    size = config.rollout.prompts_per_step
    if count is not None and count < size:
        message = (
            f"is more than the {count} prompts of data.train: a prompt is in a batch up to {-(-size // count)} times"
        )
        yield warning(config, "rollout.prompts_per_step", message, "lower it, or give more data")


def _oversample(config: Config) -> Iterator[Problem]:
    if not config.rollout.oversample:
        return
    if config.rollout.uniform_groups == "refill":
        message = "draws further prompts before it is known how many are needed, and uniform_groups: refill after it"
        yield error(config, "rollout.oversample", message, "set 0, or uniform_groups: drop")
    if config.rollout.replay is not None:
        message = "is for engines; what was not waited for is not in rollout.replay"
        yield error(config, "rollout.oversample", message, "set 0")


def _uniform_groups(config: Config) -> Iterator[Problem]:
    if config.rollout.uniform_groups == "keep":
        return
    if config.rollout.samples_per_prompt == 1:
        message = "would drop everything: the rewards of a group of one are always equal"
        yield error(config, "rollout.uniform_groups", message, "sample at least 2 per prompt, or set keep")
    if config.objective.advantage.kind == "mean_baseline":
        message = "would drop groups that teach: objective.advantage.kind compares them with the whole batch"
        yield error(config, "rollout.uniform_groups", message, "set keep, or an advantage within the group")
