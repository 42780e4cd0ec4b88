"""How often Triton compiles, and with which options.

Counts of tokens, segments and rows differ in every step, and must not make it start.
"""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.kernels import aot
from tests.kernels.compiling import code

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Every launch of batches of many sizes and of windows of many lengths, as Triton tells compiled kernels apart.
RECORD = """
from benchmarks.kernels import aot_launches
from ctpo_kernels import loss_triton
from ctpo_kernels.spec import LossSpec
import torch

def window(start, end, segments):
    batch, spec = aot_launches.batch_of(4096, segments), LossSpec(loss_agg_mode="token-mean")
    state = torch.zeros(segments, 3, dtype=torch.int64)
    stream = loss_triton.TritonLossStream(batch, spec, 0.1, totals=None, state=state)
    stream.step(start, end)

found, fused = {}, set()
for size in ((2, 1), (16, 1), (17, 2), (4096, 16), (70001, 300), (1 << 22, 5)):
    for launch in aot_launches.recorded(lambda: aot_launches.launch_loss(size, {}), ""):
        found.setdefault(launch.kernel, set()).add(launch.key)
        fused.add(launch.options["enable_fp_fusion"])
    counted = aot_launches.recorded(lambda: aot_launches.launch_loss(size, {"loss_agg_mode": "token-mean"}), "")
    found.setdefault("count_kernel", set()).update(note.key for note in counted if note.kernel == "count_kernel")
for place in ((0, 1, 1), (0, 16, 2), (1, 18, 16), (2048, 4096, 300)):
    for launch in aot_launches.recorded(lambda: window(*place), ""):
        found.setdefault("window", set()).add(launch.key)
for rows in (1, 2, 16, 17, 301):
    for launch in aot_launches.recorded(lambda: aot_launches.launch_layer(8, 64, 512, torch.bfloat16, rows=rows), ""):
        found.setdefault(launch.kernel, set()).add(launch.key)
        fused.add(launch.options["enable_fp_fusion"])
    for launch in aot_launches.recorded(
        lambda: aot_launches.launch_rows(512, 500, torch.float32, rows=rows, differentiable=True), ""
    ):
        found.setdefault(launch.kernel, set()).add(launch.key)
        fused.add(launch.options["enable_fp_fusion"])
print({name: len(keys) for name, keys in sorted(found.items())}, fused)
"""


def test_other_numbers_of_tokens_segments_and_rows_compile_nothing_anew() -> None:
    """Every launch asks for fused multiply-add: the default of Triton changes, and with it the bits."""
    done = code(RECORD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{dict.fromkeys(sorted([*aot.REGISTERS, 'window']), 1)} {{True}}"
