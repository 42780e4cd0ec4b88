"""Weight updates as vLLM's AsyncLLM takes them. vLLM is imported when one is made: callers may lack it."""

from __future__ import annotations

from typing import Any


def init_request(info: dict[str, Any]) -> Any:
    """What `init_weight_transfer_engine` takes. info: of the trainer's side of one of vLLM's own transports."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)


def update_request(offer: dict[str, Any]) -> Any:
    """What `update_weights` takes. offer: fields of the update info of the engine's backend."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=offer)
