"""Verify: one optimizer step under a matrix of layouts, against a float64 oracle that knows nothing of Megatron.

The batch, its anchor and the weights are the same everywhere; compared are the loss, every per-token log-prob, and the
full gradient by Hugging Face name. Layouts run as real jobs of their own, grouped by the number of ranks.
"""

from ctpo_megatron.verify.exported import Finding, check_exported
from ctpo_megatron.verify.layouts import LAYOUTS
from ctpo_megatron.verify.run import LayoutResult, unsupported_layouts, verify

__all__ = ["LAYOUTS", "Finding", "LayoutResult", "check_exported", "unsupported_layouts", "verify"]
