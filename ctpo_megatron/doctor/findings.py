"""What follows from all problems that the doctor found."""

from __future__ import annotations

from collections.abc import Sequence

from ctpo_megatron.config import Problem


def failed(problems: Sequence[Problem]) -> list[Problem]:
    """The problems that training cannot start with."""
    return [problem for problem in problems if problem.failed]


def verdict(problems: Sequence[Problem]) -> str:
    """One line."""
    bad, notes = failed(problems), sum(problem.severity == "warning" for problem in problems)
    if not bad:
        return f"ready ({notes} notes)" if notes else "ready"
    return f"not ready: {len(bad)} to mend: {', '.join(dict.fromkeys(problem.key for problem in bad))}"


def install_line(problems: Sequence[Problem]) -> str:
    """The pip line that brings what is missing; empty if nothing is."""
    extras = sorted({problem.extra for problem in failed(problems) if problem.extra})
    return f"pip install -e '.[{','.join(extras)}]'" if extras else ""
