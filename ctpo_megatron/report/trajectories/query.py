"""What is asked of all trajectories of a run, as the query string of an address says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from ctpo_megatron.data.tool_call import TOOL_STATUSES
from ctpo_megatron.report.trajectories.heads import HeadTable, Mask

Order = Literal["newest", "oldest", "reward", "-reward", "length", "-length"]
HasVerdict = Literal["", "yes", "no"]
TOOLS = ("none", "failed", *TOOL_STATUSES)
"""Values of `tool`: no call, calls without success, or any call of that status."""


class QueryError(ValueError):
    """A query that cannot be answered; the message names field, value and remedy."""


class Query(BaseModel):
    """Filters, all of which a trajectory has to pass; order and page. Empty values filter nothing.

    text: in prompt, turns, observations or outputs, whatever the case of its letters. step: such as `24` or `20-24`.
    prompt: its whole id. reward_min, reward_max: include their value. verdict: whether there is one. tool: of `TOOLS`.
    finish: the whole reason. order: of steps, or by reward or model tokens, largest first with a minus; in each, by
    step and place.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    text: Annotated[str, StringConstraints(max_length=500)] = ""
    step: Annotated[str, StringConstraints(pattern=r"^(\d{1,9}(-\d{1,9})?)?$")] = ""
    source: Literal["", "training", "evaluation"] = ""
    prompt: str = ""
    reward_min: float | None = Field(None, allow_inf_nan=False)
    reward_max: float | None = Field(None, allow_inf_nan=False)
    verdict: HasVerdict = ""
    tool: str = ""
    finish: str = ""
    order: Order = "newest"
    page: int = Field(1, ge=1, le=1_000_000)

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Query:
        """The query of a query string, in which empty fields are as absent ones. Raises QueryError."""
        try:
            found = cls.model_validate({name: value for name, value in fields.items() if value.strip()})
        except ValidationError as error:
            raise QueryError("; ".join(map(_explained, error.errors()))) from error
        if found.tool and found.tool not in TOOLS:
            raise QueryError(f"tool: {found.tool[:80]!a} is no status; give one of {', '.join(TOOLS)}")
        return found

    def fields(self) -> dict[str, Any]:
        """What differs from an empty query, for an address."""
        return self.model_dump(exclude_defaults=True)

    def has_step(self, step: int) -> bool:
        """Whether the filter of steps lets one pass."""
        if not self.step:
            return True
        first, _, last = self.step.partition("-")
        return int(first) <= step <= int(last or first)

    def mask(self, heads: HeadTable) -> Mask:
        """Rows that pass all filters but text, source and step."""
        kept = np.ones(len(heads), np.bool_)
        if self.prompt:
            kept &= heads.prompts.where(lambda name: name == self.prompt)
        if self.finish:
            kept &= heads.finish_reasons.where(lambda name: name == self.finish)
        if self.tool:
            kept &= heads.tools.where(self._has_tool)
        if self.verdict:
            kept &= np.isnan(heads.reward) == (self.verdict == "no")
        if self.reward_min is not None:
            kept &= heads.reward >= self.reward_min
        if self.reward_max is not None:
            kept &= heads.reward <= self.reward_max
        return kept

    def _has_tool(self, statuses: str) -> bool:
        found = statuses.split()
        match self.tool:
            case "none":
                return not found
            case "failed":
                return bool(found) and "success" not in found
        return self.tool in found


def snippet(texts: list[str], text: str, around: int = 70) -> tuple[str, str, str] | None:
    """What stands before, at and after the first place where a text is found; None where it is not."""
    for each in texts:
        if (match := re.search(re.escape(text), each, re.IGNORECASE)) is not None:
            start, end = match.span()
            before, after = each[max(0, start - around) : start], each[end : end + around]
            cut = ("…" if start > around else "", "…" if end + around < len(each) else "")
            return cut[0] + before, each[start:end], after + cut[1]
    return None


def _explained(error: Any) -> str:
    field = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{field[:80]!a} is no field; known: {', '.join(Query.model_fields)}"
    remedy = {"step": "give a step or a range, such as 24 or 20-24"}.get(field, error["msg"].lower())
    return f"{field}: {remedy}"
