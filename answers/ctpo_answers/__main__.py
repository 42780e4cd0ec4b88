"""Says whether an answer is right: `python -m ctpo_answers "GROUND TRUTH" "ANSWER"`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ctpo_answers.ground_truth import ground_truth_problem
from ctpo_answers.kinds import read_as
from ctpo_answers.scoring import CPU_S, ProcessorTimeError, answer_part, cpu_limit, last_boxed, score_math

_USAGE = 'usage: python -m ctpo_answers "GROUND TRUTH" "ANSWER"'
_HELP = f"""{_USAGE}

Says whether ANSWER is the GROUND TRUTH, how each of the two is read, and what is wrong with the ground truth.

  GROUND TRUTH  the answer alone, in LaTeX or plain text: '\\frac12', '10 km/h', 'x = 3', '(B)'
  ANSWER        the same, or a text of which the last \\boxed{{...}} counts

Exit status: 0 right, 1 wrong, 2 the ground truth cannot be used, or the command was not understood.
Quote both for the shell. What begins with a minus needs nothing more.

  python -m ctpo_answers '\\frac12' '0.5'
  python -m ctpo_answers '10 km/h' 'It goes at \\boxed{{10{{,}}000 \\text{{ m/h}}}}.'
"""
_RIGHT, _WRONG, _UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Print the verdict on an answer and return the exit status."""
    if list(arguments) in (["-h"], ["--help"]):
        print(_HELP, end="")
        return _RIGHT
    if len(arguments) != 2:
        print(f"{_USAGE}\ntwo arguments are needed, got {len(arguments)}; --help says more", file=sys.stderr)
        return _UNUSABLE
    gold, said = arguments
    text = said if "\\boxed" in said else f"\\boxed{{{said}}}"
    problem, score, note = ground_truth_problem(gold), None, ""
    if not problem:
        score, note = _score(text, gold)
    _show("score", "none" if score is None else f"{score:g}")
    _show("ground truth", ": ".join(read_as(gold)))
    box = last_boxed(answer_part(text))
    _show("answer", "no complete \\boxed{...} after its thinking" if box is None else ": ".join(read_as(box)))
    if problem or note:
        _show("problem", f"the ground truth {problem}" if problem else note)
    return _UNUSABLE if score is None else _RIGHT if score == 1 else _WRONG


def _score(text: str, gold: str) -> tuple[float | None, str]:
    """The score, and a note on how it came about."""
    try:
        with cpu_limit():
            return score_math(text, gold), ""
    except ProcessorTimeError:
        return 0.0, f"the answer takes more than {CPU_S:g} s of processor time to compare, which counts as wrong"
    except Exception as error:  # math-verify raises any exception of sympy, antlr and its own code
        return None, f"they cannot be compared: {type(error).__name__}: {error}"


def _show(name: str, value: str) -> None:
    print(f"{name:14}{value}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
