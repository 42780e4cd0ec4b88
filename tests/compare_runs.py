"""Compares two run directories, value by value: python -m tests.compare_runs A B [--only metrics trajectories].

Compared are the deterministic metrics of every step, of supervised fine-tuning too; statistics by position; every field
of every dumped trajectory and evaluation (token ids, log-probs, weight versions, rewards, text); and every tensor in a
safetensors file, bit for bit. Exit status 0: equal. 1: the first difference in the order of time is printed. 2:
nothing to compare, or one run lacks what the other has. Dumps need `tracking.trajectories=all`. Only files are read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

NOT_REPEATED = (
    "time/",
    "throughput/",
    "memory/",
    "tokens/per_second",
    "rollout/engines_idle",
    "rollout/generate_s",
    "rollout/sync_",
    "sandbox/wall_mean_s",
    "sandbox/exec_s",
    "sandbox/queue_s",
    "sft/seconds",
    "sft/tokens_per_s",
    "sft/model_tflops_per_s",
    "sft/trainer_peak_mib",
)
"""Prefixes of the metrics that the same run does not give again: seconds, rates, memory."""
MEASURED_OF_A_CALL = ("wall_s", "exec_s", "began_at")
MEASURED_OF_A_TRAJECTORY = ("scored_at",)
PARTS = ("sft", "trajectories", "metrics", "positions", "evaluation", "tensors")
"""In the order in which a step writes them."""
NEEDED = ("trajectories", "metrics", "tensors")
"""Without one of these two runs are not called equal, unless `--only` leaves it out."""
ABSENT = ("no_verdict", "advantage", "dropped", "log_ratio", "clip_low", "clip_high", "prefix_log_ratio")
ABSENT += ("turn_rewards", "turn_advantages", "sequence_starts", "more")
"""Fields of a trajectory that a line lacks where a column is null, or false."""
FIRST = ("token_ids", "weight_version", "rollout_log_probs", "reward")
"""Fields of a trajectory that are compared before the others."""

Items = Mapping[str, Any]
"""Where a value stands in its unit -> a number, text, list, or a tensor."""


@dataclass(frozen=True)
class Unit:
    """What is compared at once: a line of metrics, a dump, a file of tensors. order: of its time, then its part."""

    order: tuple[int, int, int, str]
    part: str
    name: str
    load: Callable[[], Items]


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def element(self, offset: int) -> tuple[int, str]:
        """Index and bytes, in hexadecimal, of the element that holds this byte."""
        size = len(self.data) // max(1, math.prod(self.shape)) or 1
        index = offset // size
        return index, self.data[index * size : (index + 1) * size].hex()


def repeatable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a step that the same run gives again."""
    return {name: value for name, value in record.items() if not name.startswith(NOT_REPEATED)}


def units(run: Path, only: Sequence[str] = PARTS) -> dict[str, Unit]:
    """What a run directory holds, by name, in the order of time."""
    found = [*_lines(run, "sft", "sft.jsonl", 0), *_lines(run, "metrics", "metrics.jsonl", 1)]
    found += _lines(run, "positions", "positions.jsonl", 1)
    found += [*_dumps(run, "trajectories"), *_dumps(run, "evaluation"), *_tensor_files(run)]
    return {unit.name: unit for unit in sorted(found, key=lambda unit: unit.order) if unit.part in only}


def _lines(run: Path, part: str, file: str, phase: int) -> Iterator[Unit]:
    path = run / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for line in text.splitlines():
        record = json.loads(line)
        step = record["step"]
        items = {f"metric {name}": value for name, value in sorted(repeatable(record).items())}
        of = f", mini-batch {record['mini_batch']}" if "mini_batch" in record else ""
        yield Unit((phase, step, PARTS.index(part), of), part, f"{file}, step {step}{of}", partial(dict, items))


def _dumps(run: Path, folder: str) -> Iterator[Unit]:
    """Dumps of resumed steps are named `discarded_*` and left out."""
    for path in (run / folder).glob("step_*.parquet"):
        if (number := path.stem.removeprefix("step_")).isdecimal():
            step = int(number)
            order = (1, step, PARTS.index(folder), "")
            yield Unit(order, folder, f"{folder}, step {step}", partial(trajectories, path))


def _tensor_files(run: Path) -> Iterator[Unit]:
    """Exported weights come last. Checkpoints have a format of their own."""
    for path in run.rglob("*.safetensors"):
        name = path.relative_to(run)
        if name.parts[0] != "checkpoints":
            order = (2, 0, 0, str(name))
            yield Unit(order, "tensors", str(name), partial(tensors, path))


def trajectories(path: Path) -> Items:
    """The fields of a dump, without the seconds of tool calls."""
    items = {}
    for place, record in enumerate(_records(path)):
        calls = record.get("tool_calls", [])
        record["tool_calls"] = [{k: v for k, v in call.items() if k not in MEASURED_OF_A_CALL} for call in calls]
        about = f"trajectory {place}, prompt {record.get('prompt_id')}, sample {record.get('sample_index')}"
        others = record.keys() - {*FIRST, *MEASURED_OF_A_TRAJECTORY}
        fields = [*(name for name in FIRST if name in record), *sorted(others)]
        for name in fields:
            items[f"{about}, {name}"] = record[name]
    return items


def _records(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq  # for these dumps only

    return [_from_columns(row) for row in pq.read_table(path).to_pylist()]


def _from_columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row as a line of JSON has it: what is not there is absent."""
    absent = [name for name in ABSENT if row.get(name, ...) in (None, False)]
    row = {name: value for name, value in row.items() if name not in absent}
    for call in row.get("tool_calls", ()):
        if isinstance(call["arguments"], str):
            call["arguments"] = json.loads(call["arguments"])
    for segment in row.get("segments", ()):
        if segment.get("token_chars", ...) is None:
            del segment["token_chars"]
    if isinstance(row.get("reward_components"), list):
        row["reward_components"] = dict(row["reward_components"])
    return row


def tensors(path: Path) -> Items:
    """The tensors of a safetensors file, in the order of their names, and its metadata."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8:start])
    items: dict[str, Any] = {"metadata": header.pop("__metadata__", None)}
    for name, about in sorted(header.items()):
        first, last = (start + offset for offset in about["data_offsets"])
        items[f"tensor {name}"] = Tensor(about["dtype"], tuple(about["shape"]), raw[first:last])
    return items


def first_difference(a: Items, b: Items) -> str | None:
    """Where two units differ first, with both values; None where they do not."""
    for left, right in zip_longest(a, b):
        if left != right:
            return f"{left or 'nothing'} against {right or 'nothing'}"
    return next((f"{name}{found}" for name in a if (found := unlike(a[name], b[name])) is not None), None)


def unlike(a: Any, b: Any) -> str | None:
    """Where inside two values the first difference is, and the values there; None: they are the same bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _unlike_tensors(a, b)
    if repr(a) == repr(b):  # of a float it names one bit pattern, and -0.0 is not 0.0, as 1 is not 1.0
        return None
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f": {len(a)} against {len(b)} values"
        pairs = ((f", position {place}", *pair) for place, pair in enumerate(zip(a, b, strict=True)))
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        pairs = ((f", {name}", a[name], b[name]) for name in sorted(a))
    else:
        return f": {a!r} against {b!r}"
    found = ((where, unlike(left, right)) for where, left, right in pairs)
    return next((f"{where}{what}" for where, what in found if what is not None), None)


def _unlike_tensors(a: Tensor, b: Tensor) -> str | None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f": {a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    if a.data == b.data:
        return None
    offset = next(place for place, (x, y) in enumerate(zip(a.data, b.data, strict=True)) if x != y)
    (index, left), (_, right) = a.element(offset), b.element(offset)
    return f", element {index}: bytes {left} against {right}"


def counted(part: str, items: Items) -> Counter[str]:
    """How much a unit holds, in the words of the last lines."""
    if part in ("trajectories", "evaluation"):
        tokens = [value for name, value in items.items() if name.endswith(", token_ids")]
        return Counter(dumps=1, samples=len(tokens), tokens=sum(map(len, tokens)), values=len(items))
    if part == "tensors":
        found = [value for value in items.values() if isinstance(value, Tensor)]
        return Counter(files=1, tensors=len(found), bytes=sum(len(tensor.data) for tensor in found))
    return Counter(steps=1, values=len(items) - 1)  # without the step


def gaps(a: Path, b: Path, ours: Iterable[str], theirs: Iterable[str]) -> list[str]:
    """What one run has and the other lacks, a line for each run."""
    left, right = dict.fromkeys(ours), dict.fromkeys(theirs)
    missing = {a: [name for name in left if name not in right], b: [name for name in right if name not in left]}
    return [
        f"only in {run}: {'; '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}"
        for run, names in missing.items()
        if names
    ]


def compare(a: Path, b: Path, only: Sequence[str] = PARTS) -> tuple[int, list[str]]:
    """Exit status, and lines that say why."""
    ours, theirs = units(a, only), units(b, only)
    amounts: dict[str, Counter[str]] = {part: Counter() for part in only}
    for name in (name for name in ours if name in theirs):
        items, other = ours[name].load(), theirs[name].load()
        if (found := first_difference(items, other)) is not None:
            return 1, [f"first difference: {name}, {found}", f"A is {a}", f"B is {b}"]
        amounts[ours[name].part] += counted(ours[name].part, items)
    lines = [f"{part}: {', '.join(f'{n:,} {what}' for what, n in amounts[part].items())}" for part in amounts]
    missing = gaps(a, b, ours, theirs)
    missing = missing or [f"no {part} in them" for part in NEEDED if part in only and not amounts[part]]
    if missing or not any(amounts.values()):
        return 2, ["not compared in full", *missing, *lines]
    return 0, [f"equal: {a} and {b}", *lines]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compare_runs", description=__doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="compare these parts")
    options = parser.parse_args(argv)
    status, lines = compare(options.runs[0], options.runs[1], options.only)
    print(*lines, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
