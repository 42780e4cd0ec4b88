"""Which of two numbers is larger? Prompts, held-out prompts, and conversations that teach the form of an answer alone.

    python examples/plain_rl/larger.py data/larger

The conversations answer with either number, right half of the time. No pair is in two files.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Pair = tuple[int, int]


def question(pair: Pair) -> dict[str, str]:
    return {"role": "user", "content": f"Which is larger, {pair[0]} or {pair[1]}?"}


def problem(pair: Pair) -> dict[str, Any]:
    return {
        "data_source": "larger",
        "prompt": [question(pair)],
        "reward_model": {"ground_truth": str(max(pair))},
    }


def conversation(pair: Pair) -> dict[str, Any]:
    answer = {"role": "assistant", "content": f"\\boxed{{{random.choice(pair)}}}"}
    return {"messages": [question(pair), answer]}


def write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    random.seed(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if a != b]
    random.shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "heldout.jsonl", map(problem, pairs[:256]))
    write(folder / "train.jsonl", map(problem, pairs[256:4256]))
    write(folder / "sft.jsonl", map(conversation, pairs[4256:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
