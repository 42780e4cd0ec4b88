"""What earlier versions took and this one refuses, with one sentence each on what takes its place."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from ctpo_megatron.base.run_paths import RunPaths

KEYS: dict[str, str] = {
    "prepare": "`python -m examples.toolmath DIRECTORY` writes the task: name its files in model, data and sft",
    "run.accept_changed_code": "a resume with changed code warns, and names the files: remove the key",
    "run.end_on_stall": "policy.timeout_minutes ends a run in which a rank stands still: remove the key",
    "run.stall_timeout_s": "stacks are written before policy.timeout_minutes ends a run: remove the key",
    "sft.export": "every run with SFT keeps the model in sft_model/: remove the key",
    "sft.from": "give model.path=RUN/sft_model and sft=null",
    "tracking.python": "trackers share the trainer's environment: `pip install -e '.[mlflow]'`, and remove the key",
    "tracking.trajectory_format": "dumps are parquet: remove the key",
}
"""Dotted key of a section or a leaf -> what takes its place. Passed over in the configuration that a run has stored."""

VALUES: dict[tuple[str, str], str] = {
    ("rollout.weights.transport", "file"): "give tcp, which engines on the same machine fetch from, too, or auto",
    ("rollout.weights.transport", "nccl_m2n"): "give nccl or auto",
    ("sandbox.require", "seccomp"): (
        "allow Landlock or namespaces; else none inside a VM or gVisor, or sandbox.url elsewhere"
    ),
}
"""Dotted key and a value that it no longer has -> what takes its place. Passed over as `KEYS` are."""

VERBS: dict[str, str] = {
    "data": "`python -m examples.prepare_data RAW --output FILE`, from the root of a checkout, makes prompt files",
    "watch": "`ctpo report RUN`, also of a running one; with `--steps 20-24` it writes a page of trajectories",
    "theory": "docs/notebooks/theory.ipynb has its tables and figures",
    "trajectories": "`ctpo report RUN --steps 20-24` writes a page; `pandas.read_parquet` reads trajectories/*.parquet",
}
"""Verb of `ctpo` -> what takes its place."""

_MEASURE = "the dry run gives no hours; `ctpo train CONFIG run.steps=2` shows the time of a step"

OPTIONS: dict[tuple[str, str], str] = {
    ("sweep", "--sft"): "to share an SFT, give model.path=RUN/sft_model sft=null",
    **{("train", option): _MEASURE for option in ("--mfu", "--decode", "--peak-tflops")},
    ("doctor", "--nodes"): "`ctpo launch CONFIG --nodes N --check` checks every node of a job",
}
"""Verb of `ctpo` and an option that it no longer has -> what takes its place."""


def key_advice(key: str) -> str | None:
    """Returns what replaces a key, or of the removed section that it lies in."""
    parts = key.split(".")
    sections = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((KEYS[section] for section in sections if section in KEYS), None)


def command_advice(verb: str, option: str = "") -> str | None:
    """Returns what replaces a verb of `ctpo`, or of an option of it."""
    return OPTIONS.get((verb, option)) if option else VERBS.get(verb)


def without_removed(tree: dict[str, Any], file: Path | None = None) -> dict[str, Any]:
    """Return a stored configuration, as plain mappings, without removed keys and values.

    file: where it was read; one that no run has stored stays as it is.
    """
    if file is not None:
        paths = RunPaths(file.parent)
        if file.name != paths.config.name or not paths.environment.exists():
            return tree
    kept = deepcopy(tree)
    for key in KEYS:
        _delete(kept, key)
    for key, value in VALUES:
        _delete(kept, key, value)
    return kept


def _delete(tree: dict[str, Any], key: str, value: Any = None) -> None:
    """Delete a key that is there. value: only with this value; None: with any."""
    *sections, name = key.split(".")
    node: Any = tree
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if isinstance(node, dict) and (value is None or node.get(name) == value):
        node.pop(name, None)
