"""What the doctor finds, and what follows from all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; with `missing` and `broken` there is no training.

    fix: what to do. extra: of setup.py, that brings what is missing.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""
    extra: str = ""

    @property
    def failed(self) -> bool:
        return self.status in ("missing", "broken")


def failed(findings: Sequence[Finding]) -> list[Finding]:
    """Those that training cannot do with."""
    return [finding for finding in findings if finding.failed]


def verdict(findings: Sequence[Finding]) -> str:
    """One line."""
    bad, notes = failed(findings), sum(finding.status == "note" for finding in findings)
    if not bad:
        return f"ready ({notes} notes)" if notes else "ready"
    return f"not ready: {len(bad)} to mend: {', '.join(dict.fromkeys(finding.name for finding in bad))}"


def install_line(findings: Sequence[Finding]) -> str:
    """The pip line that brings what is missing; empty if nothing is."""
    extras = sorted({finding.extra for finding in failed(findings) if finding.extra})
    return f"pip install -e '.[{','.join(extras)}]'" if extras else ""
