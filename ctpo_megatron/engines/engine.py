"""The rollout engine: vLLM's AsyncLLM in a Ray actor, with whole groups of episodes played next to it."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.data.trajectory import ToolCall, Trajectory
from ctpo_megatron.engines.expected import leave_out_expected
from ctpo_megatron.engines.logs import path_here, redirect_output
from ctpo_megatron.engines.tasks import (
    INITIAL_VERSION,
    EngineDied,
    EngineSeat,
    EngineSpec,
    GroupOutcome,
    GroupTask,
    Sampling,
    UpdateReport,
    engine_arguments,
    engine_environment,
)
from ctpo_megatron.engines.turns import TurnScheduler
from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.environments.episode import Episode, EpisodeFailed, EpisodeLimits, ModelTurn, play
from ctpo_megatron.environments.factory import make_environment, make_toolbox
from ctpo_megatron.environments.seeds import trajectory_seed
from ctpo_megatron.environments.template import MessageTemplate, TokenizerCodec, stop_token_ids
from ctpo_megatron.environments.tokenizer import use_chat_template

_CPU_SHARE = 4
"""On a CPU, so small a part of `max_num_seqs` is enough for its matrix products; a GPU wants all that there are."""


class RolloutEngine:
    """One engine; made a Ray actor by the fleet. `start` loads the model, everything else needs it."""

    def __init__(self, index: int, spec: EngineSpec) -> None:
        self._log = path_here(spec, index)
        redirect_output(self._log)
        leave_out_expected()
        os.environ.update(engine_environment(spec.device, spec.config.rollout.engine))
        if spec.transport == "ipc":  # handles of GPU memory travel pickled, from our trainer to our engine
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        self._spec, self._config = spec, spec.config
        self._requests = 0
        self._version, self._updated = INITIAL_VERSION, asyncio.Condition()
        self._precedence = TurnScheduler(_room(spec))
        self._asleep = False
        self._finished: list[list[Trajectory]] = []

    async def seat(self) -> EngineSeat:
        """Where this engine is; answers before the model loads."""
        import ray

        return EngineSeat(ray.get_runtime_context().get_node_id(), _node_address(), str(self._log))

    async def with_log(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function makes of the path of the log on this node."""
        return function(str(self._log), *arguments)

    async def start(self) -> tuple[int, EngineFacts]:
        """Load the users' parts, model and tokenizer; returns the process id, and what a transport has to know."""
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from ctpo_megatron.engines.cpu.core_client import in_process_engine
        from ctpo_megatron.engines.weights import receiver

        activate(self._config.extensions.path or ())
        self._tools = make_toolbox(self._config, self._spec.sandbox_url)
        self._environment = make_environment(self._config.rollout)
        backend = {"file": receiver.FILE, "tcp": receiver.TCP}.get(self._spec.transport, self._spec.transport)
        arguments = engine_arguments(self._config, self._spec.model_path, self._spec.device)
        engine = self._config.rollout.engine
        with _refusals_in_words():
            settings = AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend=backend), **arguments)
            if self._spec.device == "cpu" and engine.tensor_parallel_size == 1:
                self._llm = in_process_engine(settings, engine.threads)
            else:
                self._llm = AsyncLLM.from_engine_args(settings)
        await self._llm.update_weight_version(str(INITIAL_VERSION))
        self._codec = self._make_codec(self._llm.get_tokenizer())
        rollout = self._config.rollout
        self._limits = EpisodeLimits(
            rollout.max_turns,
            rollout.max_turn_tokens,
            rollout.max_response_tokens,
            rollout.engine.max_model_len,
            rollout.max_tool_calls,
            rollout.max_tool_s,
        )
        gc.collect()
        gc.freeze()  # the imported world is large and stays: full collections would cost more than the episodes
        return os.getpid(), EngineFacts(self._llm.model_config.dtype, _node_address())

    async def ping(self) -> str:
        """The current weight version, as the engine core itself answers."""
        return str(await self._llm.get_weight_version())

    async def run_group(self, task: GroupTask) -> GroupOutcome:
        """Play all samples of one prompt at once; siblings of an episode that fails are cancelled.

        Waits for the weights of the task, until the fleet takes the group back or replaces this engine.
        """
        async with self._updated:
            await self._updated.wait_for(lambda: self._version >= task.version)
        trajectories = [
            Trajectory(task.prompt.id, i, trajectory_seed(self._spec.run_seed, task.step, task.prompt.id, i))
            for i in task.samples
        ]
        finished: list[Trajectory] = []
        if task.early:
            self._finished.append(finished)

        async def play_one(episode: Episode) -> None:
            with self._precedence.trajectory(task.step):
                finished.append(await play(self._environment, episode))

        generate = self._turn_generator(task.sampling, task.step)
        parts: dict[str, Any] = {"codec": self._codec, "tools": self._tools, "limits": self._limits}
        episodes = [Episode(task.prompt, trajectory, engine=generate, **parts) for trajectory in trajectories]
        try:
            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(play_one(episode))
        except BaseExceptionGroup as errors:
            failures = [error for error in errors.exceptions if isinstance(error, EpisodeFailed)]
            if len(failures) != len(errors.exceptions):
                raise _root_error(errors) from None
            calls = [call for trajectory in trajectories for call in trajectory.tool_calls]
            return GroupOutcome(None, str(failures[0]), calls)
        finally:
            # By identity: groups with equal samples, such as none yet, are equal lists.
            self._finished = [of_group for of_group in self._finished if of_group is not finished]
        return GroupOutcome(trajectories)

    async def take_finished(self) -> list[Trajectory]:
        """Samples that have finished since the last call, of groups that are still played."""
        taken = [trajectory for of_group in self._finished for trajectory in of_group]
        for of_group in self._finished:
            of_group.clear()
        return taken

    async def update_weights(self, offer: dict[str, Any], version: int) -> UpdateReport:
        """Replace the weights by the offered ones, drop all cached prefixes, and change to `version`.

        Requests in flight are paused meanwhile and continue with the new weights, with a recomputed KV cache. They also
        continue after a failure: vLLM's engine then dies of layers without weights, and the requests with it, so that
        no caller waits for them. A sleeping engine has no requests.
        """
        began = time.monotonic()
        try:
            await self.start_weight_update()
            await self.receive_weights(offer)
            report = await self.finish_weight_update(version)
            return replace(report, seconds=time.monotonic() - began)
        finally:
            await self._go_on()

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Connect to the trainer's side of one of vLLM's own transports."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def start_weight_update(self) -> None:
        """Pause requests, and make the parameters loadable."""
        if not self._asleep:
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.start_weight_update()

    async def receive_weights(self, offer: dict[str, Any]) -> None:
        """Load the offered tensors, all or some."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=offer))

    async def finish_weight_update(self, version: int) -> UpdateReport:
        """Switch to the new weights, compute their checksums, and resume the requests."""
        try:
            await self._llm.finish_weight_update(weight_version=str(version))
            answers = await self._llm.collective_rpc("ctpo_checksums", args=(version,))
            taken = await self.ping()  # later it would wait for a step that recomputes all caches
        finally:
            await self._go_on()
        async with self._updated:
            self._version = version
            self._updated.notify_all()
        return UpdateReport(taken, [tuple(part) for of_worker in answers for part in of_worker])

    async def _go_on(self) -> None:
        """Resume the requests that an update paused, if any."""
        if not self._asleep and await self._llm.is_paused():
            await self._llm.resume_generation()

    async def sleep(self, level: int) -> None:
        """Release the GPU memory; level 1: the weights stay in host memory, 2: they are dropped. Requests are
        aborted."""
        await self._llm.sleep(level=level, mode="abort")
        self._asleep = True

    async def wake_up(self, tags: list[str]) -> None:
        """Allocate memory for `weights`, `kv_cache` or both; with both allocated, sampling continues."""
        self._asleep = not await self._llm.wake_up(tags=tags)

    async def shutdown(self) -> None:
        """Stop the engine core."""
        self._llm.shutdown(timeout=2.0)

    def _make_codec(self, tokenizer: Any) -> TokenizerCodec:
        use_chat_template(tokenizer, self._config)
        stops = stop_token_ids(tokenizer, self._spec.model_path)
        kwargs = self._config.model.chat_template_kwargs
        template = MessageTemplate(tokenizer, kwargs, sorted(stops), self._tools.schemas)
        if self._tools.schemas:  # a chat template without tool messages is refused now, not at the first call
            template.frame(self._tools.render([ToolCall(1, "", {}, "success", "", 0.0)]))
        return TokenizerCodec(tokenizer, template, stops)

    def _turn_generator(self, sampling: Sampling, step: int) -> Callable[..., Awaitable[ModelTurn]]:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        stops, strings = sorted(self._codec.stop_ids), list(self._tools.stop)

        async def generate(token_ids: Sequence[int], *, max_tokens: int, seed: int) -> ModelTurn:
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=max_tokens,
                seed=seed,
                stop_token_ids=stops,
                stop=strings,
                include_stop_str_in_output=bool(strings),  # the tokens that hold it are kept either way
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(strings),
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
            await self._precedence.begin(step)
            try:
                self._requests += 1
                last = None
                async for output in self._llm.generate(tokens_input(list(token_ids)), params, f"r{self._requests}"):
                    last = output
            finally:
                self._precedence.end()
            if last is None or last.outputs[0].finish_reason not in ("stop", "length"):
                raise RuntimeError(f"the engine ended a request with {last and last.outputs[0].finish_reason!r}")
            return _model_turn(last.outputs[0])

        return generate


@contextmanager
def _refusals_in_words() -> Iterator[None]:
    """Arguments that vLLM refuses, as ValueError: its own error may hold what cannot be pickled, and then Ray sends a
    traceback in its place."""
    try:
        yield
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(f"{error.title}: {said.removeprefix(': ')}") from error


def _room(spec: EngineSpec) -> int:
    """Turns at once, within which a batch shares the engine with an earlier one."""
    most = spec.config.rollout.engine.max_num_seqs
    return most if spec.device == "cuda" else max(1, most // _CPU_SHARE)


def _node_address() -> str:
    """Of the Ray node that this process belongs to, for the other nodes."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _root_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is no tool failure; vLLM hands one EngineDeadError to all, whose traceback only grows."""
    error = next(error for error in errors.exceptions if not isinstance(error, EpisodeFailed))
    return EngineDied(str(error)) if type(error).__name__ == "EngineDeadError" else error


def _model_turn(output: Any) -> ModelTurn:
    token_ids = list(output.token_ids)
    log_probs = list(output.logprobs.logprobs)
    versions: list[int] = []
    for span in output.weight_versions:
        versions += [int(span.version)] * (span.end - span.start)
    return ModelTurn(token_ids, log_probs, versions)
