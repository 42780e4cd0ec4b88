"""CTPO (Cumulative Token Policy Optimization, arXiv 2605.07331) on Megatron-Core."""

__version__ = "0.3.0"
