"""The collectives that this rank is waiting in, from torch's flight recorder, on gloo and on NCCL."""

from __future__ import annotations

import json
from typing import Any

from torch._C import _distributed_c10d

_RECORDS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Dump functions of gloo, and of NCCL, which a CPU build of torch lacks."""


def pending_collectives() -> list[str]:
    """Collectives that this rank has started but not finished, oldest first; empty when torch keeps no record of them.

    An item reads `all_reduce, number 17 of TENSOR_MODEL_PARALLEL_GROUP, Float [4]`. The number counts the collectives
    of a group: ranks whose numbers or names differ wait for each other in vain.
    """
    records = [getattr(_distributed_c10d, name)() for name in _RECORDS if hasattr(_distributed_c10d, name)]
    entries = [entry for record in records for entry in json.loads(record).get("entries", ())]
    return [_line(entry) for entry in entries if not entry["retired"]]


def _line(entry: dict[str, Any]) -> str:
    name = entry["profiling_name"].partition(":")[2]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    tensors = [f"{dtype} {sizes}" for dtype, sizes in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)]
    return ", ".join([name, f"number {number} of {entry['process_group'][1]}", *tensors[:1]])
