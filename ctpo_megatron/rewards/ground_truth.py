"""Finds ground truths that no correct answer can match, before a run wastes its time on rewards of 0."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from pebble import ProcessExpired, ProcessPool

from ctpo_megatron.rewards.fork_server import fork_server
from ctpo_megatron.rewards.math import parse_expression, score_math

if TYPE_CHECKING:
    from ctpo_megatron.config import RewardConfig
    from ctpo_megatron.data.prompt import Prompt

_PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
_NUMBER = re.compile(r"(?<![\w.,])-?\d[\d,]*(?:\.\d+)?(?!\w)")
_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|operatorname)\s*\{[^}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_NOTHING = {"none", "nan", "null", "n/a"}
_SENTENCE_WORDS = 5
_PER_PROCESS = 64


def ground_truth_problem(answer: str) -> str:
    """Why `math_verify` would score every correct answer 0 for this ground truth, or "".

    It must score 1 against itself, and be an answer rather than a text around one. If it contains a single number among
    words, that number in a box must score 1, too.
    """
    if "####" in answer:
        final = answer.rsplit("####", 1)[1].strip()
        return f"holds a worked solution (GSM8K): keep what follows `####`, here {final!r}"
    if not any(character.isalnum() for character in answer) or answer.lower() in _NOTHING:
        return "is no answer"
    text = _COMMAND.sub(" ", answer)
    words, numbers = _WORD.findall(text), _NUMBER.findall(text)
    if len(words) >= _SENTENCE_WORDS:
        return "is a sentence, which no model writes word for word: keep the answer alone"
    try:
        if not score_math(f"\\boxed{{{answer}}}", answer):
            return "scores 0 against itself: math-verify cannot read it"
        if len(numbers) != 1 or not text.replace(numbers[0], "").strip(" $%\\{}()"):
            return ""
        is_text = words or len(parse_expression(answer)) < 2  # not an expression: compared as text
        if is_text and not score_math(f"\\boxed{{{numbers[0]}}}", answer):
            return f"has words or signs around a number, and \\boxed{{{numbers[0]}}} scores 0: write the answer alone"
    except Exception as error:  # math-verify raises any exception of sympy, antlr and its own code
        return f"cannot be compared with itself: {type(error).__name__}: {error}"
    return ""


def unverifiable(prompts: Sequence[Prompt], config: RewardConfig) -> dict[int, str]:
    """The prompts that `math_verify` scores and whose ground truth it can never match: index -> reason.

    Every distinct ground truth is checked once, in processes on all CPUs: 12 CPU-milliseconds for a formula; a plain
    number is always readable. One that takes longer than `config.timeout_s` is listed, too: its rewards would be
    timeouts.
    """
    ours = [
        (index, prompt.answer)
        for index, prompt in enumerate(prompts)
        if config.by_source.get(prompt.data_source, config.function).name == "math_verify"
    ]
    reasons = _reasons({answer for _, answer in ours if not _PLAIN.fullmatch(answer)}, config)
    return {index: reasons[answer] for index, answer in ours if reasons.get(answer)}


def _reasons(answers: Iterable[str], config: RewardConfig) -> Mapping[str, str]:
    answers = sorted(answers)
    if not answers:
        return {}
    # All CPUs: nothing else of the run is working yet.
    workers = min(len(os.sched_getaffinity(0)), math.ceil(len(answers) / _PER_PROCESS))
    with ProcessPool(max_workers=workers, initializer=_start, context=fork_server(math=True)) as pool:
        results = pool.map(ground_truth_problem, answers, timeout=config.timeout_s).result()
        reasons: dict[str, str] = {}
        for answer in answers:
            try:
                reasons[answer] = next(results)
            except FutureTimeoutError:
                reasons[answer] = f"takes longer than reward.timeout_s ({config.timeout_s:g} s) to compare with itself"
            except ProcessExpired as died:
                reasons[answer] = f"ends the process that compares it with itself ({died})"
    return reasons


def _start() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides its warning that timeouts are off
