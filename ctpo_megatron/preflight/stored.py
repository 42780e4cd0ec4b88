"""The rendered rows that a run keeps: read at a resume, compared with the files and the settings of now, written."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config
from ctpo_megatron.environments.factory import offered_schemas, system_prompt
from ctpo_megatron.environments.prompts import scorer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ctpo_megatron.data import RowSet, StoredRows

Kind = Literal["train", "eval", "sft"]

log = logging.getLogger(__name__)

_SHOWN = 5
_CLOCK = "strftime_now"
"""What a chat template calls for the date."""
_DATE = "date"
_SETTINGS = ("data.system_prompt", "data.tool_in_prompt and rollout.tools", "model.chat_template_kwargs")
"""Of `made_of`: keys that the user writes. A change of the others is reported, and the stored tokens are used."""
_RESTORE = "restore it, or begin another run (run.name=other; of `ctpo eval`: another --output)"
_RERENDER = "data.rerender=true renders them again"


@dataclass(frozen=True)
class RowStore:
    """Stored rows of a run, a file for each of `train`, `eval` and `sft`.

    paths: of the run; None: nothing is kept. others: of the runs that `checkpoint.load` and `rollout.replay` name,
    whose rows are taken where it has none. made_of: what the rendering depends on now; scorer: what verdicts on ground
    truths depend on. rerender: stored tokens are not used, but rows have to be what they were. writes: false for a dry
    run.
    """

    paths: RunPaths | None
    others: tuple[RunPaths, ...]
    made_of: dict[str, str]
    scorer: str
    rerender: bool = False
    writes: bool = True

    @classmethod
    def of(
        cls, config: Config, tokenizer: PreTrainedTokenizerBase, directory: Path | None, *, writes: bool = True
    ) -> RowStore:
        """The store of a run directory, or of the output of `ctpo eval`."""
        named = [Path(each) for each in (config.checkpoint.load, config.rollout.replay) if each]
        return cls(
            RunPaths(directory) if directory else None,
            tuple(RunPaths(folder) for path in named for folder in (path, *path.parents[:3])),
            _made_of(config, tokenizer),
            scorer_of(config.reward) if directory else "",
            config.data.rerender,
            writes,
        )

    def read(self, kind: Kind) -> StoredRows | None:
        """The rows of a kind that were stored. Raises DamagedFileError."""
        from ctpo_megatron.data import StoredRows

        if self.paths is None:
            return None
        for paths in (self.paths, *self.others):
            if not (file := paths.rows_of(kind)).exists():
                continue
            try:
                stored = StoredRows.read(file)
            except DamagedFileError as error:
                if self.rerender:
                    return None
                raise DamagedFileError(f"{error}; {_RERENDER}, from the data files") from error
            if paths is self.paths or stored.made_of | {_DATE: ""} == self.made_of | {_DATE: ""}:
                return stored
        return None

    def compare(self, kind: Kind, found: RowSet, stored: StoredRows | None, *, whole: bool) -> None:
        """Report rows that are not what they were, and settings that rendered others, as problems.

        whole: all rows of the files were read.
        """
        if stored is None or not self._is_own(kind):
            return
        changed = stored.changed(found, whole=whole)
        root = self.paths.root if self.paths else None
        for (file, row), what in changed[:_SHOWN]:
            found.problems.general(f"{file} row {row} {what} since {root} was begun; {_RESTORE}")
        if (more := len(changed) - _SHOWN) > 0:
            found.problems.general(f"so have {more:,} more rows, {len(changed):,} in all")
        settings = [name for name in _SETTINGS if stored.made_of.get(name) != self.made_of[name]]
        if settings and not self.rerender:
            found.problems.general(
                f"{', '.join(settings)}: not as the rows of {root} were rendered with; give what it was begun with, or "
                f"{_RERENDER}"
            )

    def differences(self, kind: Kind, stored: StoredRows | None) -> list[str]:
        """What would render the rows differently now, although the stored tokens are used: a line, or none."""
        if stored is None or self.rerender:
            return []
        names = [
            _named(name, was)
            for name, was in stored.made_of.items()
            if name not in _SETTINGS and was and self.made_of[name] not in ("", was)
        ]
        if not names:
            return []
        return [f"{kind}: the stored tokens are used, although {', '.join(names)}; {_RERENDER}"]

    def write(self, kind: Kind, found: RowSet, stored: StoredRows | None) -> None:
        """Keep what was rendered and judged, unless all of it is there already."""
        from ctpo_megatron.data import StoredRows

        if self.paths is None or not self.writes:
            return
        used = None if self.rerender else stored
        now = StoredRows(found.made, used.made_of if used else self.made_of, self.scorer, found.doubts.lines)
        if used is not None and self._is_own(kind) and now == used:
            return
        if stored is None and self.paths.checkpoints.exists():
            log.info("%s has no stored rows of %s: rendered now, and kept from now on", self.paths.root, kind)
        elif stored is not None and (new := len(found.made.keys() - stored.rows.keys())):
            log.info("%d rows of %s are new since %s was begun", new, kind, self.paths.root)
        now.write(self.paths.rows_of(kind))

    def _is_own(self, kind: Kind) -> bool:
        return self.paths is not None and self.paths.rows_of(kind).exists()


def _made_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """What the tokens of a row depend on besides the row."""
    template = str(tokenizer.get_chat_template())
    of_tokenizer = [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map]
    offered = offered_schemas(config.data, config.rollout)
    settings = (system_prompt(config.data, config.rollout).text, offered, config.model.chat_template_kwargs)
    return {
        "chat template": _digest(template),
        "tokenizer": _digest(of_tokenizer),
        _DATE: time.strftime("%Y-%m-%d") if _CLOCK in template else "",
        **dict(zip(_SETTINGS, map(_digest, settings), strict=True)),
    }


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _named(name: str, was: str) -> str:
    return f"the chat template writes the date, which was {was}" if name == _DATE else f"the {name} has changed"
