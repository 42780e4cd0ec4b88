"""Packs what a GPU machine without the internet lacks to train: `python -m benchmarks.gpu_bundle`."""
