"""Reserved for the cluster launchers. Nothing is here yet; one node is started with torchrun."""
