"""Whether a written answer is the ground truth, and what is wrong with a ground truth.

- `score_math`: 1.0 when the last box of a text is the answer; `same_answer` compares two answers without a box.
- `ground_truth_problem`: why no answer could be scored against a ground truth, or "".
- `read_as`: the type and the value that an answer is read as; `canonical`: its text without meaningless marks.
- `votes`: what each of several answers votes for.
- `last_boxed`, `answer_part`: the box that counts, and the part of a turn in which it does.
- `cpu_limit`: ends a comparison after two seconds of processor time with ProcessorTimeError.
- `score_reference`, `reference_answer`: the lenient scorer behind CTPO's published accuracies.

math-verify and sympy are imported when the first formula is compared: numbers, words and quantities need neither.
"""

from ctpo_answers.comparison import canonical, same_answer, votes
from ctpo_answers.ground_truth import ground_truth_problem
from ctpo_answers.kinds import ReadAs, read_as
from ctpo_answers.reference import reference_answer, score_reference
from ctpo_answers.scoring import ProcessorTimeError, answer_part, cpu_limit, last_boxed, score_math

__version__ = "0.3.0"

__all__ = [
    "ProcessorTimeError",
    "ReadAs",
    "answer_part",
    "canonical",
    "cpu_limit",
    "ground_truth_problem",
    "last_boxed",
    "read_as",
    "reference_answer",
    "same_answer",
    "score_math",
    "score_reference",
    "votes",
]
