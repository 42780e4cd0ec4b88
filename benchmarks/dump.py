"""CPU seconds and bytes of a dump of trajectories: `python -m benchmarks.dump [--model DIR]`."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.kernels import report
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.tracking import read_trajectories, recorded_trajectories, write_trajectories

LENGTHS = (500, 2_000, 8_000, 32_000)
SOURCES = Path(__file__).parents[1] / "ctpo_megatron"


def byte_tokenizer(size: int = 8_000) -> Tokenizer:
    """A byte-level tokenizer that has learned the words of this repository's source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    texts = (path.read_text(encoding="utf-8") for path in sorted(SOURCES.rglob("*.py")))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def made_up(
    vocabulary: int, prompts: int, samples: int, length: int, traced: int = 0
) -> tuple[Iterator[Group], Mapping[int, Mapping[str, Any]]]:
    """Groups, each made when it is asked for, and what is known of the last `traced` trajectories.

    A trajectory has `length` random tokens: a prompt, and three turns with an observation after each.
    """
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return rng.integers(min(256, vocabulary // 2), vocabulary, count).tolist()  # bytes come first: no whole texts

    def trajectory(number: int, sample: int) -> Trajectory:
        made = Trajectory(f"p{number}", sample, seed=sample, reward=float(rng.random() < 0.5), finish_reason="answer")
        made.append_context(ids(length // 10), 0)
        for turn in (1, 2, 3):
            said = ids(length // 4)
            log_probs = (-rng.exponential(0.4, len(said))).astype(np.float32).tolist()  # as an engine reports them
            made.append_model(said, log_probs, [7] * len(said), turn)
            made.append_context(ids(length // 20), turn)
        return made

    def groups() -> Iterator[Group]:
        for number in range(prompts):
            prompt = Prompt(f"p{number}", "bench", (), "4", ())
            yield Group(prompt, [trajectory(number, sample) for sample in range(samples)])

    count, size = prompts * samples, len(trajectory(0, 0))
    curve = np.cumsum(rng.normal(0, 0.03, size)).astype(np.float32)
    traces = {"advantage": 0.5, "log_ratio": curve, "clip_low": curve - 1, "clip_high": curve + 1}
    return groups(), dict.fromkeys(range(count - traced, count), traces)


def decoding_s(groups: list[Group], tokenizer: Tokenizer) -> float:
    """CPU seconds that the tokenizer itself takes for the text of these trajectories, turn by turn."""
    turns = [
        [[token for token, _ in run] for _, run in itertools.groupby(pairs, key=lambda pair: pair[1])]
        for group in groups
        for trajectory in group.trajectories
        for pairs in [
            list(zip(trajectory.token_ids, zip(trajectory.turn, trajectory.response_mask, strict=True), strict=True))
        ]
    ]
    began = time.process_time()
    for turn in itertools.chain.from_iterable(turns):
        tokenizer.decode(turn, skip_special_tokens=False)
    return time.process_time() - began


def measure(folder: Path, groups: list[Group], tokenizer: Tokenizer) -> dict[str, float]:
    """CPU seconds per million tokens to write and to read a step, and bytes a token; what is read equals what was."""
    tokens = sum(len(trajectory) for group in groups for trajectory in group.trajectories)
    decoding = decoding_s(groups, tokenizer)
    began = time.process_time()
    path = write_trajectories(folder, 1, groups, lambda ids: tokenizer.decode(ids, skip_special_tokens=False))
    wrote = time.process_time()
    records = read_trajectories(path)
    read = time.process_time()
    assert len(records) == len(groups) * len(groups[0].trajectories)
    assert recorded_trajectories(path) == [t for group in groups for t in group.trajectories]
    return {
        "tokens": tokens,
        "decoding_cpu_s": decoding * 1e6 / tokens,
        "write_cpu_s": (wrote - began) * 1e6 / tokens,
        "read_cpu_s": (read - wrote) * 1e6 / tokens,
        "bytes": path.stat().st_size / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="directory with a tokenizer; default: one made from this repository's source")
    parser.add_argument("--tokens", type=int, default=400_000, help="of a dump")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(f"{options.model}/tokenizer.json") if options.model else byte_tokenizer()
    found = []
    for length in LENGTHS:
        groups = list(made_up(tokenizer.get_vocab_size(), max(1, options.tokens // length // 8), 8, length)[0])
        with tempfile.TemporaryDirectory() as folder:
            runs = (measure(Path(folder), groups, tokenizer) for _ in range(3))
            best = min(runs, key=lambda found: found["write_cpu_s"])
        found.append({"length": length, **best})
    about = report.environment("cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "dump.json").write_text(json.dumps({"environment": about, "rows": found}, indent=1) + "\n")
    figures = ("write_cpu_s", "decoding_cpu_s", "read_cpu_s")
    rows = [(m["length"], *(f"{m[name]:.2f}" for name in figures), f"{m['bytes']:.1f}") for m in found]
    text = "\n\n".join(
        (
            "# Dumps of trajectories",
            "CPU seconds per million tokens to write with decoded text, of which the tokenizer's own decoding takes "
            f"part, and to read, best of three; {options.tokens:,} random tokens a dump.",
            report.markdown(("tokens a trajectory", "write", "decoding", "read", "bytes a token"), rows),
            report.describe(about),
        )
    )
    (options.out / "dump.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
