"""Entry points that start ctpo-megatron on one node (torchrun) and on clusters."""
