"""How transformers reads a tokenizer by the class that its directory names, asked in a process without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.environments import READER_FIX, difference_of
from ctpo_megatron.preflight.timeouts import TOKENIZER_TIMEOUT_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERIC = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that read tokenizer.json as it is."""
_ASK = """
import json, sys
sys.modules["torch"] = None
from transformers import AutoTokenizer
model, text, ids = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
print(json.dumps([tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.decode(ids)]))
"""


class _NoReader(Exception):
    """Why transformers cannot read a tokenizer."""


def different_to_others(ours: PreTrainedTokenizerBase, model: str | Path) -> str:
    """`different_ids` to transformers' choice by the class that the directory names, made without torch."""
    file = Path(model) / "tokenizer_config.json"
    if not (Path(model) / "tokenizer.json").is_file() or not file.is_file():
        return ""
    named = json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class")
    if named in _GENERIC:
        return ""
    directory = str(Path(model).resolve())
    try:
        return difference_of(ours, str(named), lambda text, ids: _as_named(directory, str(named), text, tuple(ids)))
    except _NoReader as error:
        return f"transformers cannot read it as {named}, which tokenizer_config.json names ({error}); {READER_FIX}"


@cache
def _as_named(model: str, named: str, text: str, ids: tuple[int, ...]) -> tuple[list[int], str]:
    """The ids that a process of its own gives a text, and the text of `ids`. Raises _NoReader.

    named: the class, of which there may be another at the next call.
    """
    question = json.dumps([model, text, ids])
    command = [sys.executable, "-c", _ASK]
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=TOKENIZER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _NoReader(f"no answer within {TOKENIZER_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise _NoReader((done.stderr.strip().splitlines() or ["no message"])[-1])
    theirs, read = json.loads(done.stdout)
    return theirs, read
