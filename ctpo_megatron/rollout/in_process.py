"""vLLM's engine core inside the actor that uses it: no second process, no sockets, one import of everything.

vLLM gives `AsyncLLM` a core in a process of its own. On a GPU that is right: Python works while kernels run. On a CPU
the two processes compete for the same cores, and serialize every token to each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.engine import async_llm
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

log = logging.getLogger(__name__)

_NOTHING_TO_DO_S = 0.001
"""Until it is asked again for work, where requests exist and none could be scheduled."""


def in_process_engine(arguments: AsyncEngineArgs, threads: int) -> async_llm.AsyncLLM:
    """An AsyncLLM whose core runs in a thread of this process; to be used in one event loop.

    threads: of the model. OMP_NUM_THREADS is read when torch is imported, which has happened.
    """
    torch.set_num_threads(threads)
    with _cores_made_here():
        return async_llm.AsyncLLM.from_engine_args(arguments)


@contextmanager
def _cores_made_here() -> Iterator[None]:
    # AsyncLLM takes no client, and vLLM's own for one process cannot be used with asyncio.
    factory: Any = async_llm.EngineCoreClient
    of_vllm = factory.make_async_mp_client
    factory.make_async_mp_client = InProcessCore.make
    try:
        yield
    finally:
        factory.make_async_mp_client = staticmethod(of_vllm)


def _call(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: InProcessCore, *arguments: Any) -> Any:
        return await self.in_turn(getattr(self.core, name), *arguments)

    return call


class InProcessCore:
    """What `AsyncLLM` asks of its core's client (`vllm.v1.engine.core_client.AsyncMPClient`), without a process.

    One thread makes the core, its steps, and everything else that is asked of it, one after another. Tools and
    conversations go on in the event loop meanwhile: PyTorch lets other threads run while it computes. AsyncLLM has one
    task that takes the outputs of a step when it has passed on those before; it asks for the next step.
    """

    engine_ranks_managed = (0,)

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "engine-core", torch.set_num_threads, (torch.get_num_threads(),))
        self.core = self._thread.submit(EngineCore, vllm_config, executor_class, log_stats).result()
        self.resources = SimpleNamespace(engine_dead=False)
        self._work = asyncio.Event()
        self._closed = False

    @classmethod
    def make(cls, vllm_config: Any, executor_class: Any, log_stats: bool, **_of_processes: Any) -> InProcessCore:
        """As `EngineCoreClient.make_async_mp_client` is called."""
        return cls(vllm_config, executor_class, log_stats)

    async def in_turn(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread, after what was asked before. Raises EngineDeadError after a failed step."""
        if self.resources.engine_dead:
            raise EngineDeadError
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Step until there are outputs. Raises EngineDeadError when a step fails, and so does all that comes later."""
        while True:
            await self._work.wait()
            try:
                outputs, has_requests = await self.in_turn(self._step)
            except Exception:
                log.exception("vLLM's engine core failed")
                self.resources.engine_dead = True
                raise EngineDeadError from None
            if not has_requests:  # a request that came meanwhile is added, and says so, after this
                self._work.clear()
            if outputs:
                return outputs
            await asyncio.sleep(_NOTHING_TO_DO_S)

    def _step(self) -> tuple[EngineCoreOutputs | None, bool]:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        return (outputs or {}).get(0), self.core.scheduler.has_requests()

    def _can_step(self) -> bool:
        return self.core.scheduler.has_requests() and not self.core.is_scheduler_paused()

    async def _look_for_work(self) -> None:
        if await self.in_turn(self._can_step):
            self._work.set()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        if await self.in_turn(self._add, request):
            self._work.set()

    def _add(self, request: EngineCoreRequest) -> bool:
        self.core.add_request(*self.core.preprocess_add_request(request))
        return self._can_step()

    async def pause_scheduler_async(self, mode: Any, clear_cache: bool) -> None:
        """No steps from now on; see `AsyncLLM.pause_generation`."""
        await self.in_turn(self.core.pause_scheduler, mode, clear_cache)
        self._work.clear()

    async def resume_scheduler_async(self) -> None:
        """Steps again."""
        await self.in_turn(self.core.resume_scheduler)
        await self._look_for_work()

    async def wake_up_async(self, tags: Any) -> bool:
        """See `AsyncLLM.wake_up`."""
        awake: bool = await self.in_turn(self.core.wake_up, tags)
        await self._look_for_work()
        return awake

    abort_requests_async = _call("abort_requests")
    collective_rpc_async = _call("collective_rpc")
    get_supported_tasks_async = _call("get_supported_tasks")
    get_weight_version_async = _call("get_weight_version")
    is_scheduler_paused_async = _call("is_scheduler_paused")
    set_weight_version_async = _call("set_weight_version")
    sleep_async = _call("sleep")

    def shutdown(self, timeout: float | None = None) -> None:
        """Release the model, within `timeout` seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._thread.submit(self.core.shutdown).result(timeout)
        self._thread.shutdown(wait=False)
