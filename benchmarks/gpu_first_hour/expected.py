"""What the figures of a GPU are expected to be: calculated before the first run on one, to be seen beside what was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True)
class Expected:
    """A bound of a figure. stage, figure: patterns. most, least: what it is at most, or at least.

    of: another figure, by stage and name, that the bound is a multiple of; without a stage, of the same one.
    """

    stage: str
    figure: str
    why: str
    most: float | None = None
    least: float | None = None
    of: tuple[str, str] | None = None


LOG_PROBS = "bfloat16 against float32, before and after a sync"
EXPECTED = (
    Expected("engine-*", "log_prob_abs_max_?", LOG_PROBS, most=0.1),
    Expected("engine-*", "log_prob_abs_mean_?", LOG_PROBS, most=0.01),
    Expected("engine-*", "log_prob_abs_mean_1", "as before the sync", most=2, of=("", "log_prob_abs_mean_0")),
    Expected("engine-in-process", "sleep_s", "level 2 keeps nothing", most=0.5),
    Expected("engine-in-process", "wake_weights_s", "memory is mapped, nothing is copied", most=0.5),
    Expected("engine-in-process", "wake_cache_s", "memory is mapped, nothing is copied", most=0.5),
    Expected("engine-v2", "tokens_per_s_1", "no slower than v1", least=1, of=("engine-v1", "tokens_per_s_1")),
    Expected("quickstart", "mismatch/log_prob_abs_max", LOG_PROBS, most=0.1),
    Expected("quickstart", "mismatch/log_prob_abs_mean", LOG_PROBS, most=0.01),
    Expected("shapes", "sync_s", "1.2 GB by IPC", most=1),
    Expected("shapes", "decode_step_ms", "64 sequences, with graphs", most=6),
    Expected("shapes-eager", "decode_step_ms", "64 sequences, without graphs", most=25),
    Expected("policy-*", "first_log_ratio_abs_max", "two passes of the same weights", most=0),
    Expected("policy-*", "reserved_over_planned", "the plan of the dry run", most=1.1),
)


def compared(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, float, str, str, str]]:
    """Stage, figure, value, bound, verdict, why. figures: by stage. A bound without the figure it needs is left out."""
    for stage, of_stage in figures.items():
        for name, value in of_stage.items():
            for expected in EXPECTED:
                if not (fnmatchcase(stage, expected.stage) and fnmatchcase(name, expected.figure)):
                    continue
                if (base := _base(expected, figures, stage)) is not None:
                    yield stage, name, value, *_verdict(expected, value, base), expected.why


def _base(expected: Expected, figures: Mapping[str, Mapping[str, Any]], stage: str) -> float | None:
    if expected.of is None:
        return 1.0
    other, name = expected.of
    return figures.get(other or stage, {}).get(name)


def _verdict(expected: Expected, value: float, base: float) -> tuple[str, str]:
    if expected.least is not None:
        bound, holds, sign = expected.least * base, value >= expected.least * base, ">="
    else:
        assert expected.most is not None
        bound, holds, sign = expected.most * base, value <= expected.most * base, "<="
    return f"{sign} {bound:.3g}", "as expected" if holds else "NOT AS EXPECTED"
