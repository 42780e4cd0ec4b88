"""Measurements of the kernels: `python -m benchmarks.kernels` (GPU suite), `python -m benchmarks.kernels.cpu_head`.

`python -m benchmarks.kernels.aot` compiles them without a GPU and checks registers, spills, memory and instructions.
"""
