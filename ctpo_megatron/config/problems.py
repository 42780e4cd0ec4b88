"""One way to say what is wrong with a configuration, so that every check reads the same and all are shown at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

from pydantic import BaseModel

from ctpo_megatron.base.redact import redacted

NO_VALUE: Any = object()
"""A problem without an offending value, e.g. a missing key."""


@dataclass(frozen=True)
class Problem:
    """Something wrong (`error`) or probably unwanted (`warning`): where, which key, what, and what would work."""

    key: str
    message: str
    fix: str = ""
    value: Any = NO_VALUE
    where: str = ""
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        value = redacted(self.value, self.key)
        subject = self.key if value is NO_VALUE else f"{self.key} = {show(value)}".lstrip()
        head = ": ".join(part for part in (self.where, subject) if part)
        text = f"{head}: {self.message}" if head else self.message
        return f"{text}; {redacted(self.fix)}" if self.fix else text


class ConfigError(Exception):
    """Every problem found, one per line; `problems` keeps them apart."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {problem}" for problem in self.problems)]))


def error(config: BaseModel, key: str, message: str, fix: str = "") -> Problem:
    """An error about a key, with its present value."""
    return Problem(key, message, fix, value_at(config, key))


def warning(config: BaseModel, key: str, message: str, fix: str = "") -> Problem:
    """A warning about a key, with its present value."""
    return Problem(key, message, fix, value_at(config, key), severity="warning")


def value_at(config: BaseModel, key: str) -> Any:
    """The value of a dotted key."""
    return reduce(getattr, key.split("."), config)


def show(value: Any, limit: int = 80) -> str:
    """A value as one would type it in YAML, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
