"""Imported by a server of test processes before anything that looks for CUDA: its ranks find two pretended GPUs."""

import os

# Kernels on claimed tensors are those of torch, and nothing is compiled for a device that is not there.
os.environ |= {"CTPO_KERNELS_BACKEND": "torch", "TORCHDYNAMO_DISABLE": "1"}

from tests.rehearsal import libraries, torch_cuda

libraries.hide_compiled()
torch_cuda.install(devices=2)
libraries.choose_platform_of_vllm()
