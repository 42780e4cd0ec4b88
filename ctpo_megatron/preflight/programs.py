"""Checks of what programs in the sandbox may read, and of what they need."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator

from ctpo_megatron.config import Problem, needs_engines
from ctpo_megatron.environments import needs_sandbox
from ctpo_megatron.preflight.check import RunContext
from ctpo_sandbox.readable import readable_above
from ctpo_sandbox.records import Limits


def check_programs(context: RunContext) -> Iterator[Problem]:
    """Programs cannot read data or what the run writes: ground truths are in both. All threads can have a stack."""
    config = context.config
    if not needs_sandbox(config.rollout) or not needs_engines(config):
        return
    secret: list[tuple[str, Iterable[str]]] = [
        ("data.train", config.data.train_files),
        ("data.eval", config.data.eval),
        ("sft.data", config.sft.data if config.sft else ()),
        ("run.root", [str(config.run.directory)]),
    ]
    for key, paths in secret:
        for path in paths:
            above = next(filter(None, map(readable_above, [path, *glob.glob(path)])), None)
            if above is not None:
                message = (
                    f"is below {above}, which programs in the sandbox may read: they could print the ground truths"
                )
                fix = "choose a folder outside of the system's and the environment's lib"
                yield Problem(key, message, fix, config.run.root if key == "run.root" else path)
    if why := Limits.of(config.sandbox).threads_too_many:
        yield context.error("sandbox.threads", why)
