"""Fused kernels for CTPO; depends on torch (and triton on CUDA) only, usable without the rest of the project."""
