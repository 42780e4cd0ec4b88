"""Jobs on clusters: `ctpo_launchers.node` runs on every node, `ctpo_launchers.launch` submits (docs/cluster.md)."""


class LaunchError(Exception):
    """A job cannot start: the message names the reason, and the node where one is to blame."""
