"""The first hour on a GPU: `python -m benchmarks.gpu_first_hour`, or `make gpu-first-hour`."""
