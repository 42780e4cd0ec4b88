"""Verify: one optimizer step under a matrix of layouts, against a float64 oracle that is independent of Megatron.

The batch, its anchor and the weights are the same everywhere. Loss, per-token log-probs and the full gradient by
Hugging Face name are compared. Layouts run as separate real jobs, grouped by the number of ranks.
"""

from ctpo_megatron.verify.exported import Finding, check_exported
from ctpo_megatron.verify.layouts import LAYOUTS, OBJECTIVES
from ctpo_megatron.verify.readback import read_back
from ctpo_megatron.verify.run import TOLERANCE, LayoutResult, unsupported_layouts, verify

__all__ = [
    "LAYOUTS",
    "OBJECTIVES",
    "TOLERANCE",
    "Finding",
    "LayoutResult",
    "check_exported",
    "read_back",
    "unsupported_layouts",
    "verify",
]
