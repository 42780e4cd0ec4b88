"""Jobs on clusters: `ctpo_launchers.node` runs on every node, `ctpo_launchers.launch` submits (docs/cluster.md)."""
