"""The experts that tokens go to in a CPU engine, as vLLM's `enable_return_routed_experts` returns them on a GPU.

vLLM 0.32 has them in its model runner v2 alone, which needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

if TYPE_CHECKING:
    import torch
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore


class RouterChoices:
    """Experts by the slots of the KV cache, in the thread of the engine core; steps must not overlap.

    A token's experts are where its keys and values are, for as long. So tokens of the prefix cache have theirs from the
    request that computed them, and a slot that is used again has the new ones.

    Raises ValueError for a model whose routers cannot be read, such as a dense one.
    """

    def __init__(self, core: EngineCore) -> None:
        self._requests = core.scheduler.requests
        scheduler: Any = core.scheduler
        self._blocks_of = scheduler.kv_cache_manager.get_block_ids
        [worker] = core.collective_rpc(_itself)
        self._runner = worker.model_runner
        model = core.vllm_config.model_config
        experts, slots = model.get_num_experts(), self._runner.kv_cache_config.num_blocks * self._block_size
        shape = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
        # One row more: vLLM gives rows without a token the slot -1.
        self._by_slot = np.zeros((slots + 1, *shape), np.uint8 if experts <= 256 else np.uint16)
        self._kept: dict[str, NDArray[Any]] = {}
        self._given: dict[str, int] = {}
        routers = {each.layer_id: each.router for each in worker.get_model().modules() if isinstance(each, MoERunner)}
        if set(routers) != set(range(shape[0])) or not all(isinstance(each, BaseRouter) for each in routers.values()):
            known = sorted(routers)
            raise ValueError(f"policy.router_replay: of {shape[0]} layers, {known} have routers that can be read")
        for layer, router in routers.items():
            router.set_capture_fn(partial(self._capture, layer))

    @property
    def _block_size(self) -> int:
        size: int = self._runner.cache_config.block_size
        return size

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        """Called by the router of a layer in each step. experts: `[rows, choices]`."""
        mappings: Any = get_forward_context().slot_mapping
        if not mappings:  # of a pass without requests
            return
        slots: torch.Tensor = next(iter(mappings.values()))
        self._by_slot[slots[: len(experts)].numpy(), layer] = experts.numpy()

    def give_to(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Set `routed_experts` of requests that have ended in the step, `[n, layers, choices]`.

        Of the tokens from `routed_experts_prompt_start` on, without the last, which was not read. Their blocks are
        free, but no step has used them again. A request with stop strings gets a part in each step, since
        the core does not know its last one: vLLM's frontend finds the string, and joins the parts.
        """
        for output in outputs:
            name, request = output.request_id, self._runner.requests[output.request_id]
            if output.finish_reason is None and not request.sampling_params.stop:
                continue
            start = self._given.get(name, request.sampling_params.routed_experts_prompt_start)
            self._given[name] = end = request.num_tokens - 1
            output.routed_experts = self._rows(name, request.block_ids[0], end)[start:]
        self._forget()

    def keep(self) -> None:
        """Copy what running requests have, before their blocks are freed: it stays theirs."""
        self._forget()
        for name, request in self._requests.items():
            if request.num_computed_tokens:
                self._kept[name] = self._rows(name, self._blocks_of(name)[0], request.num_computed_tokens)

    def _rows(self, name: str, blocks: Iterable[int], count: int) -> NDArray[Any]:
        """Of the first `count` tokens of a request in these blocks: those that were kept, then by their slots."""
        kept = self._kept.get(name)
        size = self._block_size
        slots = (np.fromiter(blocks, np.int64)[:, None] * size + np.arange(size)).reshape(-1)[:count]
        rows = self._by_slot[slots]
        if kept is not None:
            rows[: len(kept)] = kept
        return rows

    def _forget(self) -> None:
        for of_requests in (self._kept, self._given):
            for name in of_requests.keys() - self._requests.keys():
                del of_requests[name]


def _itself(worker: Any) -> Any:
    return worker
