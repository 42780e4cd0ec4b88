"""The result of every check, of a configuration, a machine or a node. All problems are shown at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, Literal

from pydantic import BaseModel

from ctpo_megatron.base.text import hidden, redacted

Severity = Literal["ok", "warning", "missing", "error"]
"""`missing`: an error that an installation fixes."""


class _NoValue(Enum):  # unlike an object(), it stays the same when a problem is pickled
    NO_VALUE = 0


NO_VALUE: Any = _NoValue.NO_VALUE
"""A problem without an offending value, e.g. a missing key."""


@dataclass(frozen=True)
class Problem:
    """Result of a check: location, key or subject, message, and fix.

    key: of the configuration, or the subject of the check, such as a package. value: the offending value. where: file
    and line, or node. extra: the extra of setup.py that installs what is missing.
    """

    key: str
    message: str
    fix: str = ""
    value: Any = NO_VALUE
    where: str = ""
    severity: Severity = "error"
    extra: str = ""

    @property
    def failed(self) -> bool:
        """Whether it keeps training from starting."""
        return self.severity in ("missing", "error")

    @property
    def advice(self) -> str:
        """Message and fix."""
        return f"{self.message}; {self.fix}" if self.fix else self.message

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", hidden(self.message))  # it may quote an address with its login
        object.__setattr__(self, "fix", hidden(self.fix))

    def __str__(self) -> str:
        value = redacted(self.value, self.key)
        subject = self.key if value is NO_VALUE else f"{self.key} = {show(value)}".lstrip()
        head = ": ".join(part for part in (self.where, subject) if part)
        return f"{head}: {self.advice}" if head else self.advice


class ConfigError(Exception):
    """All problems, one per line; also as a list in `problems`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {problem}" for problem in self.problems)]))


def first_line(error: Exception) -> str:
    """Return the first line of an error's text (OmegaConf appends internals below it)."""
    return str(error).strip().split("\n")[0]


def error(config: BaseModel, key: str, message: str, fix: str = "") -> Problem:
    """Return an error about a key, with its present value."""
    return Problem(key, message, fix, value_of(config, key))


def warning(config: BaseModel, key: str, message: str, fix: str = "") -> Problem:
    """Return a warning about a key, with its present value."""
    return Problem(key, message, fix, value_of(config, key), severity="warning")


def value_of(config: BaseModel, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def failed(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems that training cannot start with."""
    return [problem for problem in problems if problem.failed]


def accepted(problems: Iterable[Problem]) -> list[Problem]:
    """Return the warnings. Raises ConfigError with all problems that training cannot start with, if there are any."""
    found = [*problems]
    if errors := failed(found):
        raise ConfigError(errors)
    return found


def passed(key: str, message: str) -> Problem:
    """Return the result of a check that passed, and what it saw."""
    return Problem(key, message, severity="ok")


def show(value: Any, limit: int = 80) -> str:
    """Return a value in YAML syntax, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
