"""Prompts and cold-start conversations from reasoning-gym: train.parquet, heldout.parquet, sft.parquet.

    python examples/smollm2/tasks.py runs/smollm2/task --wrong 0.5

The files have the schema of docs/data.md. No question occurs twice, in whichever files. A conversation of sft.parquet
calls Python and boxes what the program printed. Of each family a share `--wrong` of the programs makes a common
mistake. Needs the packages of requirements/examples.txt.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from programs import PROGRAMS, Programs, output

Problem = dict[str, Any]
"""As reasoning-gym makes it: `question`, `answer`, `metadata`."""
Source = Callable[[str, dict[str, Any], int], Iterator[Problem]]
"""From a family, its parameters and a seed to an endless stream of problems."""
SPLITS = ("heldout", "train", "sft")


def reasoning_gym_problems(family: str, parameters: dict[str, Any], seed: int) -> Iterator[Problem]:
    """The problems of one family of reasoning-gym; the same seed gives the same problems."""
    import reasoning_gym

    batch = 1000
    while True:
        yield from reasoning_gym.create_dataset(family, size=batch, seed=seed, **parameters)
        seed += batch  # problem i of seed s is problem i - 1 of seed s + 1


class Drawer:
    """Draws problems that no split has had, the families in turn.

    Left out are problems that the programs do not solve, and questions of more than `max_chars` characters.
    """

    def __init__(self, families: dict[str, dict[str, Any]], source: Source, max_chars: int, seed: int) -> None:
        self._streams = {family: source(family, families[family], seed * 10**7) for family in sorted(families)}
        self._max_chars = max_chars
        self._seen: set[str] = set()

    def draw(self, count: int) -> list[tuple[str, Problem, Programs]]:
        """`count` problems with their families and programs."""
        families = list(self._streams)
        return [self._next(families[place % len(families)]) for place in range(count)]

    def _next(self, family: str) -> tuple[str, Problem, Programs]:
        for problem in islice(self._streams[family], 20_000):
            question = " ".join(problem["question"].split())
            if question in self._seen or len(question) > self._max_chars:
                continue
            programs = PROGRAMS[family](problem["question"], problem["metadata"])
            if programs is not None and output(programs.right) == problem["answer"]:
                self._seen.add(question)
                return family, problem, programs
        raise ValueError(f"{family}: no new problem among 20,000; allow longer questions, or larger numbers in them")


def prompt_row(family: str, problem: Problem, name: str) -> dict[str, Any]:
    """A row of `data.train` or `data.eval`."""
    return {
        "id": name,
        "data_source": "reasoning_gym",
        "prompt": [{"role": "user", "content": problem["question"].strip()}],
        "reward_model": {"ground_truth": problem["answer"], "style": "rule"},
        "extra_info": {"family": family},
    }


def conversation(problem: Problem, program: str) -> list[dict[str, str]]:
    """A conversation of `sft.data`, as `rollout.tool_parser: fenced` calls and answers."""
    printed = output(program)
    return [
        {"role": "user", "content": problem["question"].strip()},
        {"role": "assistant", "content": f"```python\n{program}\n```"},
        {"role": "user", "content": f"The program printed:\n{printed}"},
        {"role": "assistant", "content": f"\\boxed{{{printed}}}"},
    ]


def wrong_program(problem: Problem, programs: Programs) -> str | None:
    """The first mistake that does not print the answer."""
    return next((wrong for wrong in programs.wrong if output(wrong) not in (problem["answer"], None)), None)


def write_tasks(
    directory: Path, drawer: Drawer, counts: dict[str, int], wrong_share: float, rng: Random
) -> dict[str, int]:
    """Write the three files; returns how many conversations of each family have a wrong program."""
    directory.mkdir(parents=True)
    mistakes: Counter[str] = Counter()
    for split in SPLITS:
        drawn = drawer.draw(counts[split])
        if split == "sft":
            rows, told = [], Counter[str]()
            for family, problem, programs in drawn:
                # Evenly spread: chance would leave one family with few mistakes and another with nothing else.
                due = int(wrong_share * (told[family] + 1) + 1e-9) > mistakes[family]
                wrong = wrong_program(problem, programs) if due else None
                told[family] += 1
                mistakes[family] += wrong is not None
                rows.append({"messages": conversation(problem, wrong or programs.right)})
            rng.shuffle(rows)
        else:
            rows = [prompt_row(family, problem, f"{split}/{place}") for place, (family, problem, _) in enumerate(drawn)]
        pq.write_table(pa.Table.from_pylist(rows), directory / f"{split}.parquet")
    check_disjoint(directory)
    return dict(mistakes)


def check_disjoint(directory: Path) -> None:
    """Raise ValueError when a question is in two rows, of one file or of several."""
    questions = Counter[str]()
    for split in SPLITS:
        table = pq.read_table(directory / f"{split}.parquet")
        column = table["messages" if split == "sft" else "prompt"].to_pylist()
        questions.update(messages[0]["content"] for messages in column)
    if twice := [question for question, count in questions.items() if count > 1]:
        raise ValueError(f"{len(twice)} questions occur twice, such as {twice[0]!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--families", type=Path, default=Path(__file__).with_name("families.yaml"))
    parser.add_argument("--train", type=int, default=2000, help="prompts of train.parquet")
    parser.add_argument("--heldout", type=int, default=240, help="prompts of heldout.parquet")
    parser.add_argument("--sft", type=int, default=192, help="conversations of sft.parquet")
    parser.add_argument("--wrong", type=float, default=0.5, help="share of conversations with a wrong program")
    parser.add_argument("--max-chars", type=int, default=280, help="longest question")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.directory.exists():
        print(f"{options.directory} exists; name another directory", file=sys.stderr)
        return 2
    families = yaml.safe_load(options.families.read_text())
    if unknown := sorted(set(families) - set(PROGRAMS)):
        print(f"{options.families}: no programs for {unknown}; known are {sorted(PROGRAMS)}", file=sys.stderr)
        return 2
    drawer = Drawer(families, reasoning_gym_problems, options.max_chars, options.seed)
    counts = {split: getattr(options, split) for split in SPLITS}
    mistakes = write_tasks(options.directory, drawer, counts, options.wrong, Random(options.seed))
    print(f"{options.directory}: {counts}; wrong programs: {sum(mistakes.values())} of {options.sft}, {mistakes}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
