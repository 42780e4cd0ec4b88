"""The rollout engine: vLLM's AsyncLLM in a Ray actor, which also runs the episodes of whole groups.

It is made from an `EngineSpec`, and runs one `GroupTask` at a call. Its errors tell the pool what became of the group.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import logging.config
import os
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ctpo_megatron.base.extensions import activate, shown
from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.base.stop import end_with
from ctpo_megatron.base.text import say
from ctpo_megatron.config import Device, Transport, engine_count, spec_for
from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.records import Prompt, ToolCall
from ctpo_megatron.data.tokens import ROUTER_CHOICES
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.setup import LOGGING_CONFIG, engine_setup
from ctpo_megatron.environments import (
    Episode,
    MessageTemplate,
    ModelTurn,
    Sampling,
    TokenizerError,
    ToolUnavailable,
    different_ids,
    episode_limits,
    make_environment,
    make_toolbox,
    play,
    read_tokenizer,
    stop_token_ids,
    trajectory_seed,
    use_chat_template,
)
from ctpo_megatron.plan import CpuCache, free_memory

if TYPE_CHECKING:
    from ctpo_megatron.engines.weights import EngineFacts
    from ctpo_megatron.engines.weights.checksums import Sums

log = logging.getLogger(__name__)

CORE_SHUTDOWN_S = 2.0
"""For the current step of an engine core and the release of its model."""
INITIAL_VERSION = 0
"""Version of the weights an engine loads from its model directory, before the first update."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What every engine of a pool is made from.

    sandbox_url: None: the sandbox of the engine's own node. log_dir: folder of logs; a node that does not see it writes
    them elsewhere. driver: the process that engines of a private Ray end with; None: Ray is a cluster's. folder: the
    trainer's, to which paths are relative.
    """

    config: Config
    sandbox_url: str | None
    log_dir: Path
    device: Device = "cpu"
    transport: Transport = "tcp"
    driver: int | None = None
    folder: Path = field(default_factory=Path.cwd)

    @property
    def model_path(self) -> str:
        """Hugging Face directory, absolute."""
        return str(Path(self.config.model.path).absolute())

    @property
    def resources(self) -> dict[str, int]:
        """What Ray sets aside for one engine."""
        engine = self.config.rollout.engine
        if self.device == "cuda":
            return {"CPU": 1, "GPU": engine.tensor_parallel_size}
        return {"CPU": engine.threads, "GPU": 0}

    def with_cache(self) -> EngineSpec:
        """With the size of an engine's KV cache on this CPU, which is logged, where it is not configured."""
        if self.device != "cpu" or self.config.rollout.engine.kv_cache_mb is not None:
            return self
        cache = CpuCache.of(self.config, spec_for(self.config), free_memory())
        log.info("engines: a KV cache of %d MiB each (rollout.engine.kv_cache_mb; %s)", cache.mb, cache)
        engine = self.config.rollout.engine.model_copy(update={"kv_cache_mb": cache.mb})
        rollout = self.config.rollout.model_copy(update={"engine": engine})
        return replace(self, config=self.config.model_copy(update={"rollout": rollout}))

    def log_path(self, index: int) -> Path:
        """Return the log of engine number `index`."""
        return LogPaths(self.log_dir).engine(index)


@dataclass(frozen=True, slots=True)
class GroupTask:
    """One prompt to be sampled once for each index in `samples`. occurrence: as in `trajectory_seed`."""

    prompt: Prompt
    step: int
    samples: tuple[int, ...]
    sampling: Sampling
    occurrence: int = 0


class EngineError(RuntimeError):
    """The engines cannot continue; the message names the engine, the cause and where to look."""


class EngineDied(RuntimeError):
    """The engine core behind a living actor is gone; the actor is of no further use.

    Ours, as the trainer would import all of vLLM to unpickle vLLM's own exception.
    """


class GroupFailed(RuntimeError):
    """A group was not sampled; the message is why. An exception of users' code itself does not reach the trainer.

    There its methods would run, and it may not be loadable.
    """

    lost_calls: Sequence[str] = ()
    """The statuses of the tool calls that were made in vain."""


class GroupLost(GroupFailed):
    """Another attempt would fail as well."""


class RolloutEngine:
    """One engine, run as a Ray actor by the pool. `start` loads the model, which every later call needs."""

    def __init__(self, index: int, spec: EngineSpec, address: str | None = None) -> None:
        """address: of this node, where the engine is no actor; None: Ray tells it."""
        self._log = _log_path_here(spec, index)
        _redirect_output(self._log)
        if spec.folder.is_dir():
            os.chdir(spec.folder)
        _leave_out_expected()
        if spec.driver is not None:  # Ray ends its workers by a raylet that may be gone
            end_with(spec.driver)
        self._setup = engine_setup(spec.device)
        os.environ.update(self._setup.environment(spec.config.rollout.engine))
        if spec.transport == "ipc":  # handles of GPU memory travel pickled, from our trainer to our engine
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        self._index, self._spec, self._config, self._address = index, spec, spec.config, address
        self._requests = 0
        self._version, self._updated = INITIAL_VERSION, asyncio.Condition()
        self._asleep = self._traced = False

    async def start(self) -> EngineFacts:
        """Load users' extensions, the model and the tokenizer. Returns what a transport needs."""
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs

        from ctpo_megatron.engines.weights import EngineFacts, receiver

        activate(self._config.extensions.path or ())  # first: tools and environment may be the user's
        self._tools = make_toolbox(
            self._config.rollout,
            self._config.sandbox,
            self._spec.sandbox_url,
            engines=engine_count(self._config),
            nodes=self._config.cluster.nodes,
        )
        self._environment = make_environment(self._config.rollout, self._config.data)
        backend = receiver.backend(self._spec.transport)
        arguments = self._setup.arguments(self._config, self._spec.model_path)
        with _refusals_in_words():
            settings = AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend=backend), **arguments)
            replay = self._config.policy.router_replay
            self._llm = self._setup.make(settings, self._config.rollout.engine, router_choices=replay)
        await self._llm.update_weight_version(str(INITIAL_VERSION))
        self._codec = self._make_codec(self._llm.get_tokenizer())
        self._limits = episode_limits(self._config.rollout, self._config.data)
        gc.collect()
        gc.freeze()  # imported modules are many and permanent: full collections would cost more than the episodes
        return EngineFacts(
            dtype=self._llm.model_config.dtype,
            address=self._address or _node_address(),
            transport=self._spec.transport,
            workers=self._config.rollout.engine.tensor_parallel_size,
            log=str(self._log),
        )

    async def ping(self) -> str:
        """Return the current weight version, as the engine core reports it."""
        return str(await self._llm.get_weight_version())

    async def run_group(self, task: GroupTask, version: int = INITIAL_VERSION) -> list[Trajectory]:
        """Generate all samples of one prompt concurrently; when an episode fails, the others are cancelled.

        version: of the weights that this engine is to take before. Raises EngineDied, and GroupFailed.
        """
        # Calls of an actor run concurrently: a group may begin before the update that was called earlier has ended.
        async with self._updated:
            await self._updated.wait_for(lambda: self._version >= version)
        run_seed, prompt_id = self._config.run.seed, task.prompt.id
        trajectories = [
            Trajectory(prompt_id, i, trajectory_seed(run_seed, task.step, prompt_id, i, task.occurrence))
            for i in task.samples
        ]

        generate = self._turn_generator(task.sampling, task.step)
        limits = replace(self._limits, sampling=task.sampling)
        parts: dict[str, Any] = {"codec": self._codec, "tools": self._tools, "limits": limits}
        episodes = [Episode(task.prompt, trajectory, engine=generate, **parts) for trajectory in trajectories]
        try:
            async with asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(play(self._environment, episode))
        except BaseExceptionGroup as errors:
            failures = [error for error in errors.exceptions if isinstance(error, ToolUnavailable)]
            if len(failures) != len(errors.exceptions):
                raise _root_error(errors) from None
            failed = GroupFailed(str(failures[0]))
            failed.lost_calls = [call.status for trajectory in trajectories for call in trajectory.tool_calls]
            raise failed from None
        return trajectories

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Connect to the trainer's side of one of vLLM's own transports."""
        from ctpo_megatron.engines.weights.receiver import init_request

        await self._llm.init_weight_transfer_engine(init_request(info))

    async def start_weight_update(self) -> None:
        """Pause requests, drop the prefix cache, and make the parameters loadable. The pool ends an engine that fails.

        Requests in flight continue with the new weights; their keys and values are computed again.
        """
        if not self._asleep:  # else it has no requests
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        await self._llm.start_weight_update()

    async def receive_weights(self, message: dict[str, Any]) -> None:
        """Load the tensors that a message describes: all of the model or some."""
        from ctpo_megatron.engines.weights.receiver import update_request

        await self._llm.update_weights(update_request(message))

    async def finish_weight_update(self, version: int) -> list[Sums]:
        """Switch to the new weights, and resume requests; returns the sums of what each worker has received."""
        try:
            await self._llm.finish_weight_update(weight_version=str(version))
            sums = await self._llm.collective_rpc("ctpo_sums")
        finally:
            if not self._asleep and await self._llm.is_paused():
                await self._llm.resume_generation()
        async with self._updated:
            self._version = version
            self._updated.notify_all()
        # A tuple is a list when it comes from another process.
        return [{name: (size, total) for name, (size, total) in worker.items()} for worker in sums]

    async def start_profile(self, step: str) -> None:
        """Record the steps of the engine, until `stop_profile`. step: its files begin with it."""
        await self._llm.start_profile(profile_prefix=f"{step}_engine_{self._index}")
        self._traced = True

    async def stop_profile(self) -> None:
        """Write what was recorded, if anything was, one file for each of its workers."""
        if self._traced:
            self._traced = False
            await self._llm.stop_profile()

    async def sleep(self, level: int) -> None:
        """Release GPU memory. Level 1 keeps the weights in host memory, 2 discards them. Requests are aborted."""
        await self._llm.sleep(level=level, mode="abort")
        self._asleep = True

    async def wake_up(self, tags: list[str]) -> None:
        """Allocate GPU memory for `weights`, `kv_cache` or both; with both allocated, sampling resumes."""
        self._asleep = not await self._llm.wake_up(tags=tags)

    async def shutdown(self) -> None:
        """Stop the engine core."""
        self._llm.shutdown(timeout=CORE_SHUTDOWN_S)

    def _make_codec(self, of_vllm: Any) -> MessageTemplate:
        tokenizer = read_tokenizer(self._spec.model_path)
        if (self._tools.stop or self._config.rollout.stop) and (
            difference := different_ids(tokenizer, of_vllm)
        ):  # vLLM looks for stop strings
            raise TokenizerError(f"{self._spec.model_path}: {difference}")
        use_chat_template(tokenizer, self._config.model)
        stops = stop_token_ids(tokenizer, self._spec.model_path)
        kwargs = self._config.model.chat_template_kwargs
        template = MessageTemplate(tokenizer, kwargs, sorted(stops), self._tools.schemas)
        if self._tools.schemas:  # a chat template without tool messages is refused now, not at the first call
            template.frame(self._tools.render([ToolCall(1, "", {}, "success", "", 0.0)]))
        template.check_end()
        return template

    def _turn_generator(self, sampling: Sampling, step: int) -> Callable[..., Awaitable[ModelTurn]]:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        stops = sorted(self._codec.stop_ids)
        replay = self._config.policy.router_replay

        async def generate(
            token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int, stop: Sequence[str] = ()
        ) -> ModelTurn:
            strings = [*self._tools.stop, *stop]
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
                routed_experts_prompt_start=start if replay else 0,
            )
            self._requests += 1
            request, last = tokens_input(list(token_ids)), None
            # The trainer waits for the earliest step: its turns come first.
            async for output in self._llm.generate(request, params, f"r{self._requests}", priority=step):
                last = output
            if last is None or last.outputs[0].finish_reason not in ("stop", "length"):
                raise RuntimeError(f"the engine ended a request with {last and last.outputs[0].finish_reason!r}")
            return _model_turn(last.outputs[0], replay=replay)

        return generate


def _log_path_here(spec: EngineSpec, index: int) -> Path:
    """Where engine `index` writes on this node: the folder of logs, if this node sees it, or a file of the node."""
    path = spec.log_path(index)
    return path if spec.log_dir.is_dir() else Path(tempfile.mkdtemp(prefix="ctpo-logs-")) / path.name


def _redirect_output(path: Path) -> None:
    """Send this process's and its children's stdout and stderr to `path`. Raises OSError that names it."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


class Expected(logging.Filter):
    """Passes every record but those that begin as one of `messages`, whose values say why each is expected."""

    def __init__(self, messages: Mapping[str, str]) -> None:
        super().__init__()
        self._beginnings = tuple(messages)

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginnings)


def _leave_out_expected() -> None:
    """Keep messages that would look like failures out of this process's log, before vLLM is imported.

    vLLM itself reads `LOGGING_CONFIG` only when an engine is made.
    """
    settings = json.loads(LOGGING_CONFIG.read_text(encoding="utf-8"))
    messages = settings["filters"]["expected"]["messages"]
    print(f"# {len(messages)} kinds of messages are expected and left out: ctpo_megatron/engines/{LOGGING_CONFIG.name}")
    logging.config.dictConfig(settings)


@contextmanager
def _refusals_in_words() -> Iterator[None]:
    """Raise vLLM's validation errors as ValueError: the original may hold objects that cannot be pickled, and Ray would
    send a traceback instead."""
    try:
        yield
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(f"{error.title}: {said.removeprefix(': ')}") from error


def _node_address() -> str:
    """The address of this process's Ray node, for the other nodes."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _root_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is no tool failure. All requests raise one EngineDeadError, whose traceback only grows."""
    error = next(error for error in errors.exceptions if not isinstance(error, ToolUnavailable))
    if type(error).__name__ == "EngineDeadError":
        return EngineDied(str(error))
    try:
        say("".join(traceback.format_exception(error)), error=True)  # into our log
    except BaseException as failure:  # of the exception's own methods
        say(f"{shown(error)} (printing it raised {shown(failure)})", error=True)
    return GroupFailed(shown(error))


def _model_turn(output: Any, *, replay: bool) -> ModelTurn:
    """What vLLM has sampled. replay: with experts `[n, layers, choices]`, from the prompt's start to the last but one.

    Raises RuntimeError where the model has no experts.
    """
    versions: list[int] = []  # vLLM reports spans of tokens; we keep one version a token
    for span in output.weight_versions:
        versions += [int(span.version)] * (span.end - span.start)
    if replay and output.routed_experts is None:
        raise RuntimeError("the engine reported no experts: policy.router_replay needs a mixture of experts")
    computed = {ROUTER_CHOICES: output.routed_experts} if replay else {}
    return ModelTurn(list(output.token_ids), list(output.logprobs.logprobs), versions, computed=computed)
