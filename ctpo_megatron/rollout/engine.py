"""The rollout engine: vLLM's AsyncLLM in a Ray actor, with whole groups of episodes played next to it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ctpo_megatron.data.records import Trajectory
from ctpo_megatron.environments.episode import EpisodeFailed, Limits, ModelTurn, run_episode
from ctpo_megatron.environments.seeds import trajectory_seed
from ctpo_megatron.environments.tools import ExecutionResultLike, ToolUnavailable
from ctpo_megatron.rollout.tasks import (
    INITIAL_VERSION,
    EngineDied,
    EngineSpec,
    GroupOutcome,
    GroupTask,
    Sampling,
    UpdateReport,
    engine_arguments,
    engine_environment,
)

_REQUESTS_PER_SLOT = 4


def _redirect_output(path: Path) -> None:
    """Send this process's and its children's stdout and stderr to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


class RolloutEngine:
    """One engine; made a Ray actor by the fleet. `start` loads the model, everything else needs it."""

    def __init__(self, index: int, spec: EngineSpec) -> None:
        _redirect_output(spec.log_path(index))
        os.environ.update(engine_environment(spec.device, spec.config.rollout.engine.threads))
        self._spec, self._config = spec, spec.config
        self._requests = 0

    async def start(self) -> int:
        """Load the model and tokenizer; returns the engine process id."""
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from ctpo_megatron.environments.template import ObservationTemplate, TokenizerCodec, stop_token_ids
        from ctpo_megatron.weights.vllm_worker import BACKEND

        arguments = engine_arguments(self._config, self._spec.model_path, self._spec.device)
        self._llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend=BACKEND), **arguments)
        )
        await self._llm.update_weight_version(str(INITIAL_VERSION))
        tokenizer = self._llm.get_tokenizer()
        stops = stop_token_ids(tokenizer, self._spec.model_path)
        template = ObservationTemplate(tokenizer, self._config.model.chat_template_kwargs, sorted(stops))
        self._codec = TokenizerCodec(tokenizer, template, stops)
        rollout = self._config.rollout
        self._limits = Limits(
            rollout.max_turns,
            rollout.max_turn_tokens,
            rollout.max_response_tokens,
            rollout.engine.max_model_len,
            rollout.max_observation_chars,
        )
        self._run_tool = self._spec.tool_factory() if self._spec.tool_factory else self._sandbox_tool()
        gc.collect()
        gc.freeze()  # the imported world is large and stays: full collections would cost more than the episodes
        return os.getpid()

    async def ping(self) -> str:
        """The current weight version, as the engine core itself answers."""
        return str(await self._llm.get_weight_version())

    async def run_group(self, task: GroupTask) -> GroupOutcome:
        """Play all samples of one prompt at once; siblings of an episode that fails are cancelled."""
        trajectories = [
            Trajectory(task.prompt.id, i, trajectory_seed(self._spec.run_seed, task.step, task.prompt.id, i))
            for i in range(task.samples)
        ]
        generate = self._turn_generator(task.sampling)
        try:
            async with asyncio.TaskGroup() as group:
                for trajectory in trajectories:
                    group.create_task(
                        run_episode(
                            task.prompt.token_ids,
                            trajectory,
                            generate=generate,
                            run_tool=self._run_tool,
                            codec=self._codec,
                            limits=self._limits,
                        )
                    )
        except BaseExceptionGroup as errors:
            failures = [error for error in errors.exceptions if isinstance(error, EpisodeFailed)]
            if len(failures) != len(errors.exceptions):
                raise _root_error(errors) from None
            calls = [call for trajectory in trajectories for call in trajectory.tool_calls]
            return GroupOutcome(None, str(failures[0]), calls)
        return GroupOutcome(trajectories)

    async def update_weights(self, path: str, version: int) -> UpdateReport:
        """Replace the weights by those in the safetensors file `path`, forget all cached prefixes, take on `version`.

        Requests in flight are frozen meanwhile and go on with the new weights.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": path}))
        await self._llm.finish_weight_update(weight_version=str(version))
        answers = await self._llm.collective_rpc("ctpo_compare_weights", args=(path,))
        await self._llm.resume_generation()
        wrong = tuple(sorted({name for _, names in answers for name in names}))
        return UpdateReport(await self.ping(), min(count for count, _ in answers), wrong)

    async def shutdown(self) -> None:
        """Stop the engine core."""
        self._llm.shutdown(timeout=2.0)

    def _turn_generator(self, sampling: Sampling) -> Callable[..., Awaitable[ModelTurn]]:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        stops = sorted(self._codec.stop_ids)

        async def generate(token_ids: Sequence[int], *, max_tokens: int, seed: int) -> ModelTurn:
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=max_tokens,
                seed=seed,
                stop_token_ids=stops,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
            self._requests += 1
            last = None
            async for output in self._llm.generate(tokens_input(list(token_ids)), params, f"r{self._requests}"):
                last = output
            if last is None or last.outputs[0].finish_reason not in ("stop", "length"):
                raise RuntimeError(f"the engine ended a request with {last and last.outputs[0].finish_reason!r}")
            return _model_turn(last.outputs[0])

        return generate

    def _sandbox_tool(self) -> Callable[[str], Awaitable[ExecutionResultLike]]:
        from ctpo_sandbox import SandboxClient, SandboxUnavailable

        sandbox = self._config.sandbox
        limit = sandbox.max_concurrency
        if sandbox.url is None:  # our own server: more than keeps its slots busy only makes the HTTP pool slow
            limit = min(limit, _REQUESTS_PER_SLOT * sandbox.slots)
        share = max(1, limit // self._config.rollout.engines)
        client = SandboxClient(
            self._spec.sandbox_url.split(","), max_concurrency=share, request_timeout_s=sandbox.request_timeout_s
        )

        async def run_tool(code: str) -> ExecutionResultLike:
            try:
                return await client.run(code, run_timeout_s=sandbox.run_timeout_s)
            except SandboxUnavailable as error:
                raise ToolUnavailable(str(error)) from error

        return run_tool


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
