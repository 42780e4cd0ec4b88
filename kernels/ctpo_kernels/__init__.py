"""Reserved for the fused kernels: the objective in one pass. Nothing is here yet; `ctpo_megatron.objective` is used."""
