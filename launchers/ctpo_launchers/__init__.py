"""Jobs on clusters: `ctpo_launchers.node` runs on every node, `ctpo_launchers.launch` submits (docs/cluster.md).

`task` and `executor` are for NeMo Run experiments of one's own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_launchers.jobs import executor, task

__all__ = ["LaunchError", "executor", "task"]


class LaunchError(Exception):
    """A job cannot start: the message names the reason, and the node where one is to blame."""


def __getattr__(name: str) -> Any:
    """NeMo Run is imported for those who ask for it: nodes have none."""
    if name not in ("executor", "task"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ctpo_launchers import jobs

    return getattr(jobs, name)
