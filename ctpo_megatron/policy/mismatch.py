"""Refuses a batch whose sampler and trainer log-probs differ too much, and warns of noise."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping

log = logging.getLogger(__name__)


def check_mismatch(metrics: Mapping[str, float], limit: float | None, max_response_tokens: int) -> None:
    """Raises RuntimeError when sampler and trainer log-probs differ by more than `limit` (nats; None: no limit).

    A batch without tokens of the current weights has nothing to compare. Warns once when their noise alone crosses the
    clip window within `max_response_tokens` (`mismatch/t_star`).
    """
    difference = metrics.get("mismatch/log_prob_abs_max", 0.0)
    if limit is not None and not difference <= limit:  # a NaN exceeds every limit
        raise RuntimeError(
            f"sampler and trainer log-probs differ by up to {difference:.3g}, more than rollout.mismatch_limit="
            f"{limit}: a weight sync did not arrive, or the two sides compute in different precision"
        )
    if metrics.get("mismatch/t_star", math.inf) < max_response_tokens:
        _warn_of_noise(max_response_tokens)


@functools.cache
def _warn_of_noise(longest: int) -> None:
    log.warning(
        "sampler and trainer differ by so much noise at equal weights (mismatch/sigma) that a ratio against the "
        "sampler leaves the clip window by it alone (at token mismatch/t_star) before rollout.max_response_tokens=%d: "
        "compute both sides in the same precision, or see objective.correction (docs/objective.md)",
        longest,
    )
