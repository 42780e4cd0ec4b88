"""Makes a configuration for a user's own model, data and reward functions: what `ctpo init` prints."""

from ctpo_megatron.init.job import Made, make_job
from ctpo_megatron.init.prompts import InitError

__all__ = ["InitError", "Made", "make_job"]
