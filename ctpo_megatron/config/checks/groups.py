"""Checks of what happens to the sampled groups before they are trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ctpo_megatron.config.problems import Problem
from ctpo_megatron.config.schema import Config


def check_groups(config: Config) -> Iterator[Problem]:
    """Filters that can be told apart."""
    names = Counter(part.short_name for part in config.rollout.filters)
    for name in (name for name, count in names.items() if count > 1):
        message = f"holds {names[name]} filters named {name}, and metrics could not tell them apart"
        yield Problem(
            "rollout.filters", message, "remove one, or give yours another name", [*map(str, config.rollout.filters)]
        )
