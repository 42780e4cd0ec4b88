"""Names of data sets of the Hugging Face Hub, which may stand where a data file or a folder does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.config.reads import exists

_WORD = r"\w[\w.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?::(?:({_WORD})/)?({_WORD}))?(?:@([\w./-]+))?")
_FILES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".gz", ".zst", ".bz2")


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name:subset/split@revision`; all but `org/name` may be left out."""

    repo: str
    subset: str | None = None
    split: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, text: str) -> HubName | None:
        """Return what a text names; None for a path: one that exists, or that without split and revision looks like
        one.
        """
        found = _NAME.fullmatch(text)
        if found is None or exists(text):
            return None
        is_path = text.endswith(_FILES) or Path(text).parent.is_dir()
        return None if text == found[1] and is_path else cls(*found.groups())

    def __str__(self) -> str:
        parts = "/".join(filter(None, (self.subset, self.split)))
        return self.repo + (f":{parts}" if parts else "") + (f"@{self.revision}" if self.revision else "")
