"""What a run learned: held-out accuracy of its last evaluation minus its first, problem by problem.

    python examples/smollm2/learned.py runs/smollm2_tir data/smollm2/heldout.parquet

The interval is a 95 % percentile bootstrap over problems, of the paired differences: 10,000 times as many problems are
drawn with replacement. `--before` names another run, such as the cold start that several runs share; its last
evaluation is taken. The first line has the share of groups that RL could learn from at its first step.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from ctpo_megatron.tracking import read_trajectories


def scores(evaluation: Path) -> dict[str, float]:
    """Prompt id -> mean reward of its samples; problems without a verdict are left out."""
    rewards = defaultdict(list)
    for row in read_trajectories(evaluation):
        if row["reward"] is not None:
            rewards[row["prompt_id"]].append(row["reward"])
    return {prompt: float(np.mean(values)) for prompt, values in rewards.items()}


def mixed_at_first(run: Path) -> float:
    """`reward/groups_mixed` of the first RL step."""
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return float(next(record["reward/groups_mixed"] for record in records if record["step"] == 1))


def evaluations(run: Path) -> list[Path]:
    """The held-out answers of a run, earliest first."""
    return sorted((run / "evaluation").glob("step_*.parquet"))


def paired_interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """Mean of `differences` `[problems]`, and the ends of its 95 % interval."""
    rng = np.random.default_rng(seed)
    means = rng.choice(differences, (10_000, len(differences))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(differences.mean()), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("heldout", type=Path, help="the prompts, for the family of each")
    parser.add_argument("--before", type=Path, help="the run whose last evaluation is the first")
    options = parser.parse_args()
    before = evaluations(options.before)[-1] if options.before else evaluations(options.run)[0]
    after = evaluations(options.run)[-1]
    first, last = scores(before), scores(after)
    rows = pq.read_table(options.heldout, columns=["id", "extra_info"]).to_pylist()
    families = {row["id"]: row["extra_info"]["family"] for row in rows}
    print(f"groups with right and wrong answers at the first step: {mixed_at_first(options.run):.3f}")
    print(f"{before} -> {after}")
    for family in [*sorted(set(families.values())), None]:
        prompts = [prompt for prompt in first if prompt in last and family in (None, families[prompt])]
        old, new = (np.array([scored[prompt] for prompt in prompts]) for scored in (first, last))
        change, low, high = paired_interval(new - old)
        name = family or f"all {len(prompts)}"
        print(f"{name:16} {old.mean():.3f} -> {new.mean():.3f}  {change:+.3f} [{low:+.3f}, {high:+.3f}]")


if __name__ == "__main__":
    main()
