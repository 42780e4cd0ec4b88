"""What a run's rows were rendered with, kept so that a resume continues with the same or says what changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ctpo_megatron.base.files import DamagedFileError, write_json
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config
from ctpo_megatron.environments import offered_schemas, system_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ctpo_megatron.data import RowSet

Kind = Literal["train", "eval", "sft"]

_BEGAN, _ROWS = "began", "rows"


@dataclass(frozen=True)
class Rendering:
    """Digests of what the rows of a run are rendered with, now and when it was begun.

    paths: of the run; None: nothing is compared or kept. writes: keep what rows were rendered with. began: the date
    that chat templates write, so that a run that is resumed on another day has the same prompts. made_of: name ->
    digest, of now. former: what the run has kept: kind -> name or file -> digest; name of the Hub -> commit.
    """

    paths: RunPaths | None
    began: datetime
    made_of: dict[str, str]
    former: dict[Kind, dict[str, str]]
    writes: bool

    @classmethod
    def of(
        cls, config: Config, tokenizer: PreTrainedTokenizerBase, directory: Path | None, *, writes: bool
    ) -> Rendering:
        """Of a run directory, or of the output of `ctpo eval`.

        A new run that `checkpoint.load` or `rollout.replay` bases on another one takes that run's date. Raises
        DamagedFileError.
        """
        paths = RunPaths(directory) if directory else None
        bases = [Path(each) for each in (config.checkpoint.load, config.rollout.replay) if each]
        others = [RunPaths(folder) for path in bases for folder in (path, *path.parents[:3])]
        made_of, former, began = _made_of(config, tokenizer), dict[Kind, dict[str, str]](), datetime.now()
        if paths is None or config.data.rerender:
            return cls(paths, began, made_of, former, writes)
        for each in (paths, *others):
            if each.rendering.exists():
                began, rows = _read(each.rendering)
                former = rows if each is paths else {}
                break
        return cls(paths, began, made_of, former, writes)

    def check(self, kind: Kind, found: RowSet) -> None:
        """Add a problem to rows that are not what they were, or not rendered as they were; keep what others were."""
        if self.paths is None:
            return
        former = self.former.get(kind, {})
        digests = {str(file): digest for file, digest in found.digests().items()}
        now = self.made_of | digests | {name: each.commit for name, each in found.hub.items()}
        if changed := [name for name, digest in former.items() if now.get(name, digest) != digest]:
            found.problems.general(
                f"changed since {self.paths.root} was begun: {', '.join(changed)}. Restore it, begin another run "
                "(run.name=other; of `ctpo eval`: another --output), or continue with what there is now by "
                "data.rerender=true"
            )
        if self.writes and former != now and not found.problems.lines:
            self.former[kind] = {**former, **now}
            self.paths.root.mkdir(parents=True, exist_ok=True)
            write_json(self.paths.rendering, {_BEGAN: self.began.isoformat(), _ROWS: self.former}, durable=True)


def _read(path: Path) -> tuple[datetime, dict[Kind, dict[str, str]]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return datetime.fromisoformat(kept[_BEGAN]), {kind: {**digests} for kind, digests in kept[_ROWS].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(
            f"{path} does not hold what the rows of this run were rendered with ({type(error).__name__}: {error}); "
            "data.rerender=true continues with what there is now"
        ) from error


def _made_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns what the tokens of a row depend on besides the row and the date."""
    values = {
        "chat template": tokenizer.get_chat_template(),
        "tokenizer": [tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map],
        "data.system_prompt": system_prompt(config.data, config.rollout).text,
        "data.tool_in_prompt and rollout.tools": offered_schemas(config.data, config.rollout),
        "model.chat_template_kwargs": config.model.chat_template_kwargs,
    }
    return {name: _digest(value) for name, value in values.items()}


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
