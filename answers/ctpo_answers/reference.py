"""Our own implementation of the scorer behind CTPO's published accuracies.

That scorer (`verl/utils/reward_score` of github.com/horizon-llm/CTPO at acc4021) reads the whole response, tool output
included, and accepts it if any of three rules does. It is more lenient than `score_math`: a number that a tool
printed, or that is mentioned in passing, counts. Use it to compare numbers, not to train.
"""

from __future__ import annotations

import re

from ctpo_answers.comparison import same_answer
from ctpo_answers.layout import plain
from ctpo_answers.scoring import last_boxed

_TAIL = 300
"""Characters at the end of a response in which a line `Answer: ...` counts."""
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:/\d+)?(?!.*\d)", re.DOTALL)


def score_reference(text: str, answer: str) -> float:
    """Return 1.0 when the last box, last line `Answer: ...` or math-verify's parse of `text` equals `answer`, else 0.0.

    text: the whole response. Like `score_math` it sets no time limit. Raises ValueError when `answer` cannot be read.
    """
    if not plain(answer):
        raise ValueError(f"cannot read the ground truth {answer!r}")
    box, in_text = last_boxed(text), _found(text)
    if box is not None and in_text == _found(f"\\boxed{{{box}}}"):
        in_text = None  # it is from the box, without its unit
    found = (box, _answer_line(text), in_text)
    return float(any(each is not None and each.strip() and same_answer(answer, each) for each in found))


def reference_answer(text: str) -> str | None:
    """Return the answer that this scorer most likely reads: box, answer line, else the last number; None without."""
    found = last_boxed(text) or _answer_line(text)
    if found is None and (number := _LAST_NUMBER.search(text[-_TAIL:])):
        found = number[0]
    return found


def _answer_line(text: str) -> str | None:
    lines = _ANSWER_LINE.findall(text[-_TAIL:])
    return str(lines[-1]).rpartition("=")[2] if lines else None


def _found(text: str) -> str | None:
    """What math-verify takes for the answer in a text: only its search is used, since its comparison rounds."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    layout = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True)  # without dropping units
    kinds = [ExprExtractionConfig(), LatexExtractionConfig(normalization_config=layout)]
    found = parse(text, extraction_config=kinds, parsing_timeout=None)
    return next((each for each in reversed(found) if isinstance(each, str)), None)
