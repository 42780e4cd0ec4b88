"""All presets of the objective on the quickstart, three seeds each: `python -m benchmarks.presets --folder DIR`.

The runs are those of a sweep in the folder, which continues where it was interrupted. What each has found is kept in
presets.json, and another machine runs only what is missing there. About three minutes a run on two free cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.kernels import report
from ctpo_megatron.config import PRESETS
from ctpo_megatron.report.estimates import Estimate, ScoredProblem, ScoredSet, difference, evaluations, mean_score
from ctpo_megatron.report.groups import groups_of
from ctpo_megatron.report.run_data import RunData

SWEEP = "presets"
REFERENCE = "ctpo"
CLIPPED = "pg_update/clip/total/rate"

Found = dict[str, Any]
"""Of one run: preset, seed, commit, device, `start` (digest of the weights), `before` (accuracy), `right` (which
problems, as hexadecimal bits), their `count` and digest (`problems`), `clipped` (least and greatest of a step)."""


def sweep(folder: Path, presets: Sequence[str], seed: int) -> bool:
    """Do the runs of these presets that are missing; whether it came to its end."""
    values = [f"run.seed={seed}", f"objective.preset={','.join(presets)}", f"run.name={SWEEP}-{seed}-{len(presets)}"]
    command = [sys.executable, "-m", "ctpo_megatron.cli", "sweep", str(runs.CONFIG), "--grid", *values]
    command += [f"run.root={folder}", "tracking.report=false", "export.enabled=false"]
    return subprocess.run(command, cwd=runs.ROOT, env={**os.environ, **runs.environment()}, check=False).returncode == 0


def finished(folder: Path) -> list[RunData]:
    """The runs of all sweeps in the folder that have ended well."""
    found = (path.parent for path in sorted(folder.glob(f"{SWEEP}*/*/config.yaml")) if path.parent.name != "sft")
    return [run for run in map(RunData.load, found) if "finished_steps" in run.environment]


def measured(run: RunData) -> Found:
    """What is kept of a run."""
    (group,) = groups_of([run])
    before, after = (evaluations(group, last=last).by_seed for last in (False, True))
    ((scored,),) = (sources.values() for sources in after.values())
    ((started,),) = (sources.values() for sources in before.values())
    names = sorted(scored)
    bits = "".join(str(int(scored[name].score or 0)) for name in names)
    digest = hashlib.blake2b("\n".join(f"{name} {scored[name].answer}" for name in names).encode(), digest_size=8)
    clipped = [row[CLIPPED] for row in run.metrics if CLIPPED in row]
    return {
        "preset": run.setting("objective.preset", ""),
        "seed": run.setting("run.seed", 0),
        "commit": run.environment["commit"],
        "device": f"{run.environment['devices'][0]}, {run.environment['cpus']} cores",
        "start": run.environment["sft_from"]["digest"],
        "before": mean_score({"": started}).value,
        "right": f"{int(bits, 2):x}",
        "count": len(names),
        "problems": digest.hexdigest(),
        "clipped": [min(clipped), max(clipped)] if clipped else None,
    }


def scored(run: Found) -> ScoredSet:
    """The problems of a run, by place; the digest stands for their answers."""
    bits = f"{int(run['right'], 16):0{run['count']}b}"
    return {str(place): ScoredProblem(run["problems"], float(bit)) for place, bit in enumerate(bits)}


def table(found: Sequence[Found]) -> str:
    """A row a preset: accuracies, their mean, the difference from CTPO, and the clipped share of tokens."""
    by_preset: dict[str, dict[str, Found]] = {}
    for run in sorted(found, key=lambda run: (list(PRESETS).index(run["preset"]), run["seed"])):
        by_preset.setdefault(run["preset"], {})[str(run["seed"])] = run
    of_preset: Mapping[str, dict[str, ScoredSet]] = {
        preset: {seed: scored(run) for seed, run in of_seed.items()} for preset, of_seed in by_preset.items()
    }
    rows = []
    for preset, of_seed in of_preset.items():
        accuracies = [mean_score({seed: problems}).value for seed, problems in of_seed.items()]
        other = of_preset.get(REFERENCE) if preset != REFERENCE else None
        less = shown(difference(of_seed, other), "+") if other else ""
        shares = [share for run in by_preset[preset].values() if run["clipped"] for share in run["clipped"]]
        clipped = f"{100 * min(shares):.2g} to {100 * max(shares):.2g} %" if shares else ""
        row = (
            f"`{preset}`",
            ", ".join(f"{value:.3f}" for value in accuracies),
            shown(mean_score(of_seed)),
            less,
            clipped,
        )
        rows.append(row)
    seeds = sorted({run["seed"] for run in found})
    header = (
        "objective",
        f"accuracy of seeds {', '.join(map(str, seeds))}",
        "mean",
        f"less `{REFERENCE}`",
        "clipped, by step",
    )
    return report.markdown(header, rows)


def shown(estimate: Estimate, sign: str = "") -> str:
    """Value and interval."""
    if estimate.interval is None:
        return f"{estimate.value:{sign}.3f}"
    low, high = estimate.interval
    return f"{estimate.value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def page(found: Sequence[Found]) -> str:
    """The results as a document."""
    starts = sorted({f"{run['before']:.3f}" for run in found})
    made = sorted({f"{run['device']}, commit {run['commit'][:8]}" for run in found})
    return "\n\n".join(
        (
            "# All presets on the quickstart",
            f"{found[0]['count']} held-out problems, greedy. Each seed has its own task and supervised stage; accuracy "
            f"before: {', '.join(starts)}. Brackets: 95 % interval over seeds. Presets have their defaults: with "
            "`objective.anchor: proximal` ratios are those of the trainer, also where the authors take the sampler's.",
            table(found),
            "Made on " + "; ".join(made) + ".",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--only-collect", action="store_true", help="take the runs that are there, and start none")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    store = options.out / "presets.json"
    kept = json.loads(store.read_text()) if store.exists() else []
    found = {(run["preset"], run["seed"]): run for run in kept}

    def collect() -> set[tuple[str, int]]:
        here = {(run["preset"], run["seed"]): run for run in map(measured, finished(options.folder))}
        found.update({key: run for key, run in here.items() if key not in found})
        if found:
            store.write_text(json.dumps(list(found.values()), indent=1) + "\n")
            (options.out / "presets.md").write_text(page(list(found.values())) + "\n")
        return set(here)

    here = collect()
    for seed in options.seeds if not options.only_collect else ():
        # Runs of this folder stay in the grid: the same grid continues the same sweep, with the same supervised stage.
        grid = [preset for preset in options.presets if (preset, seed) not in found or (preset, seed) in here]
        missing = any((preset, seed) not in found for preset in grid)
        if missing and not sweep(options.folder, grid, seed):
            collect()
            sys.exit(f"the sweep of seed {seed} did not come to its end; the same command continues")
        collect()
    print(page(list(found.values())))


if __name__ == "__main__":
    main()
