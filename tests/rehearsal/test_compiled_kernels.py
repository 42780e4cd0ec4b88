"""After the warm-up of a run on GPUs, its steps have no kernel left to compile."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ctpo_megatron.config import CorrectionConfig, ObjectiveConfig
from tests.rehearsal import start
from tests.rehearsal.cases import CONTEXT, DENSE, TENSOR, Case
from tests.support import ranks

LAYER = {"swiglu_kernel", "swiglu_grad_kernel", "rotary_kernel"}
STREAMING = LAYER | {"row_stats_kernel", "merge_kernel", "gradient_kernel", "loss_kernel", "reduce_kernel"}
WHOLE = STREAMING | {"span_totals_kernel"}
SLOW = pytest.mark.slow
CTPO = ObjectiveConfig()
CORRECTED = ObjectiveConfig(correction=CorrectionConfig(level="token"))
DAPO, GSPO = ObjectiveConfig(preset="dapo"), ObjectiveConfig(preset="gspo")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("case", "objectives", "kernels"),
    [
        pytest.param(
            Case("torch", 1, DENSE, "bfloat16", "streaming", True), [CORRECTED, DAPO, GSPO], WHOLE, marks=SLOW
        ),
        pytest.param(Case("torch", 1, DENSE, "bfloat16", "logits", True), [CORRECTED, DAPO], WHOLE, marks=SLOW),
        pytest.param(Case("torch", 2, DENSE, "bfloat16", "streaming", True, TENSOR), [CTPO], STREAMING, marks=SLOW),
        pytest.param(Case("torch", 2, DENSE, "bfloat16", "streaming", True, CONTEXT), [CTPO], WHOLE, marks=SLOW),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_steps_compile_nothing(
    case: Case, objectives: list[ObjectiveConfig], kernels: set[str], tmp_path: Path
) -> None:
    ranks.run(start.build_models, tmp_path, pretend_cuda=True)
    for launched, missing in ranks.run(
        start.left_to_compile, case, objectives, tmp_path, ranks=case.ranks, pretend_cuda=True
    ):
        assert launched == kernels
        assert missing == []
