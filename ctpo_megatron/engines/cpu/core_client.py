"""vLLM's engine core in a thread of the actor that uses it: no second process, no sockets, one import of everything.

vLLM gives `AsyncLLM` a core in a process of its own. On a GPU that is right: Python works while kernels run. On a CPU
the two processes compete for the same cores, and serialize every token.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.engine import async_llm
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.exceptions import EngineDeadError

from ctpo_megatron.engines.cpu.router_choices import RouterChoices
from ctpo_megatron.engines.engine import CORE_SHUTDOWN_S

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

log = logging.getLogger(__name__)


def in_process_engine(arguments: AsyncEngineArgs, threads: int, *, router_choices: bool = False) -> async_llm.AsyncLLM:
    """Return an AsyncLLM whose core runs in a thread of this process; to be used in one event loop.

    threads: of the model. OMP_NUM_THREADS is read when torch is imported, which has happened. router_choices: final
    outputs have `routed_experts`, of a mixture of experts.
    """
    torch.set_num_threads(threads)
    with _cores_made_here(router_choices):
        return async_llm.AsyncLLM.from_engine_args(arguments)


@contextmanager
def _cores_made_here(router_choices: bool) -> Iterator[None]:
    # AsyncLLM accepts no client, and vLLM's own client for one process has no asyncio interface.
    factory: Any = async_llm.EngineCoreClient
    original = factory.make_async_mp_client
    factory.make_async_mp_client = partial(InProcessCore.make, router_choices)
    try:
        yield
    finally:
        factory.make_async_mp_client = staticmethod(original)


def _call(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: InProcessCore, *arguments: Any, **named: Any) -> Any:
        return await self.in_turn(partial(self._ask, name, *arguments, **named))

    return call


class InProcessCore:
    """The client of `AsyncLLM` (like `vllm.v1.engine.core_client.AsyncMPClient`), without a second process.

    One thread creates the core and runs its steps and all other calls, one at a time. Tools and conversations continue
    in the event loop meanwhile: PyTorch lets other threads run while it computes. AsyncLLM has one task that fetches
    outputs when it has processed the previous ones; fetching runs the next step.
    """

    engine_ranks_managed = (0,)

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, router_choices: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "engine-core", torch.set_num_threads, (torch.get_num_threads(),))
        self.core = self._thread.submit(EngineCore, vllm_config, executor_class, log_stats).result()
        self.resources = SimpleNamespace(engine_dead=False)
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.Event()
        self._closed = False
        self._ready: deque[EngineCoreOutputs] = deque()
        self._choices = self._thread.submit(RouterChoices, self.core).result() if router_choices else None

    @classmethod
    def make(
        cls,
        router_choices: bool,
        vllm_config: Any,
        executor_class: Any,
        log_stats: bool,
        **_of_processes: Any,
    ) -> InProcessCore:
        """Takes what `EngineCoreClient.make_async_mp_client` takes, after `router_choices`."""
        return cls(vllm_config, executor_class, log_stats, router_choices)

    async def in_turn(self, function: Callable[[], Any]) -> Any:
        """Call a function in the thread, after all earlier calls. Raises EngineDeadError after a failed step."""
        if self.resources.engine_dead:
            raise EngineDeadError
        return await self._loop.run_in_executor(self._thread, self._then_look_for_work, function)

    def _then_look_for_work(self, function: Callable[[], Any]) -> Any:
        # In the thread: no other call changes the core in between, and work of a cancelled caller is still seen.
        result = function()
        if self.core.scheduler.has_requests() and not self.core.is_scheduler_paused():
            self._loop.call_soon_threadsafe(self._work.set)
        return result

    async def get_output_async(self) -> EngineCoreOutputs:
        """Run steps until there are outputs. Raises EngineDeadError when a step fails, and so do all later calls."""
        while not self._ready:
            await self._work.wait()
            self._work.clear()
            try:
                outputs, executed = await self.in_turn(self._step)
            except Exception:
                log.exception("vLLM's engine core failed")
                self.resources.engine_dead = True
                raise EngineDeadError from None
            self._ready.extend(outputs)
            if not executed and not outputs:
                await asyncio.sleep(0.001)  # no request could be scheduled: other calls of the core go first
        return self._ready.popleft()

    def _step(self) -> tuple[list[EngineCoreOutputs], bool]:
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        if (mine := (outputs or {}).get(0)) is None:
            return [], executed
        if self._choices is not None:
            self._choices.give_to(mine.outputs)
        return [mine], executed

    def _add(self, request: EngineCoreRequest) -> None:
        self.core.add_request(*self.core.preprocess_add_request(request))

    def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        if self._choices is not None and name == "pause_scheduler":
            self._choices.keep()  # a pause may drop the cache, to which their places belong
        return getattr(self.core, name)(*arguments, **named)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        await self.in_turn(partial(self._add, request))

    abort_requests_async = _call("abort_requests")
    collective_rpc_async = _call("collective_rpc")
    get_supported_tasks_async = _call("get_supported_tasks")
    get_weight_version_async = _call("get_weight_version")
    is_scheduler_paused_async = _call("is_scheduler_paused")
    profile_async = _call("profile")
    pause_scheduler_async = _call("pause_scheduler")
    resume_scheduler_async = _call("resume_scheduler")
    set_weight_version_async = _call("set_weight_version")
    sleep_async = _call("sleep")
    wake_up_async = _call("wake_up")

    def shutdown(self, timeout: float | None = None) -> None:
        """Release the model, within `timeout` seconds. Raises TimeoutError when the thread is busy for longer.

        timeout: None, as AsyncLLM calls it when it is collected, is `CORE_SHUTDOWN_S`. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        released = self._thread.submit(self.core.shutdown)
        self._thread.shutdown(wait=False)
        released.result(CORE_SHUTDOWN_S if timeout is None else timeout)
