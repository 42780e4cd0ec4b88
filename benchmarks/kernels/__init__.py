"""Measurements of the kernels: `python -m benchmarks.kernels` (GPU suite), `python -m benchmarks.kernels.cpu_head`."""
