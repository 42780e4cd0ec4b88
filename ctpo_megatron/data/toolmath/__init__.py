"""A synthetic task on which a tiny model learns, within minutes on a CPU, to call a code interpreter."""

from ctpo_megatron.data.toolmath.prepare import prepare

__all__ = ["prepare"]
