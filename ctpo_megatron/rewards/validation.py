"""Checks the ground truths of all prompts, in processes that can be killed, and counts those to look at."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pebble import ProcessExpired, ProcessPool

from ctpo_megatron.rewards.fork_server import end_with_trainer, fork_server
from ctpo_megatron.rewards.workers import RETRIES, Workers

if TYPE_CHECKING:
    from ctpo_megatron.config import RewardConfig
    from ctpo_megatron.data.records import Prompt

_PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
_SHOWN = 10
_PER_PROCESS = 128
"""Ground truths for which another process is worth its start: each one learns the grammar again, in about a second."""
_PATIENCE_S = 30.0
"""For a process to start, before the limit of an answer."""


def unverifiable(prompts: Sequence[Prompt], config: RewardConfig) -> dict[int, str]:
    """Return the prompts that `math_verify` scores and whose ground truth it can never match: index -> reason.

    Every distinct ground truth is checked once, in processes on all CPUs: 13 CPU-milliseconds for a long formula. A
    plain number is always readable. One that takes longer than `config.timeout_s` is listed, too: its rewards would be
    timeouts. Raises RewardWorkersLost.
    """
    ours = [(index, prompt.answer) for index, prompt in enumerate(prompts) if _is_scored(prompt, config)]
    reasons = _reasons(sorted({answer for _, answer in ours if not _PLAIN.fullmatch(answer)}), config)
    return {index: reasons[answer] for index, answer in ours if reasons.get(answer)}


def _reasons(answers: Sequence[str], config: RewardConfig) -> dict[str, str]:
    from ctpo_answers import ground_truth_problem

    if not answers:
        return {}
    # All CPUs: nothing else of the run is working yet.
    count, limit_s = min(len(os.sched_getaffinity(0)), math.ceil(len(answers) / _PER_PROCESS)), config.timeout_s
    make = partial(ProcessPool, max_workers=count, initializer=end_with_trainer, context=fork_server(math=True))
    workers, reasons = Workers(make, _PATIENCE_S + limit_s), dict[str, str]()
    try:
        found = workers.run(ground_truth_problem, [(each,) for each in answers], limit_s, RETRIES)
    finally:
        workers.close()
    for answer, result in zip(answers, found, strict=True):
        match result:
            case str():
                reasons[answer] = result
            case TimeoutError():
                reasons[answer] = f"takes longer than reward.timeout_s ({limit_s:g} s) to compare with itself"
            case ProcessExpired():
                reasons[answer] = f"ends the process that compares it with itself ({result})"
            case _:
                raise result
    return reasons


def in_words(prompts: Iterable[Prompt], config: RewardConfig) -> Counter[str]:
    """Return how often `math_verify` scores against which words. Look at them: a word may say that there is no
    answer.
    """
    return _counted(prompts, config, "words")


def as_products(prompts: Iterable[Prompt], config: RewardConfig) -> Counter[str]:
    """Return how often `math_verify` reads letters of one family, such as `abc` and `bad`, as a product of
    variables.
    """
    return _counted(prompts, config, "product of letters")


def _counted(prompts: Iterable[Prompt], config: RewardConfig, kind: str) -> Counter[str]:
    from ctpo_answers import read_as

    found: Counter[str] = Counter()
    for answer, count in Counter(prompt.answer for prompt in prompts if _is_scored(prompt, config)).items():
        if not _PLAIN.fullmatch(answer) and (reading := read_as(answer)).kind == kind:
            found[reading.value] += count
    return found


def shown_words(found: Counter[str]) -> str:
    """Return the most frequent of some words with their counts, for a person to look at."""
    shown = ", ".join(f"{words!r} {count:,}" for words, count in found.most_common(_SHOWN))
    return f"{shown}, ..." if len(found) > _SHOWN else shown


def _is_scored(prompt: Prompt, config: RewardConfig) -> bool:
    """Whether `math_verify` scores the answers to a prompt."""
    return config.by_source.get(prompt.data_source, config.function).name == "math_verify"
