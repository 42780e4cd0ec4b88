"""The first trajectory of a run, played before anything starts: an example call, its output, an answer, its reward.

All parts are the run's own, but for the model: its turns come from a script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.extensions import ExtensionError, activate, load
from ctpo_megatron.checks.sandboxes import trial_sandbox
from ctpo_megatron.config import Config, Extension, Problem, SandboxConfig, flattened
from ctpo_megatron.data import Prompt, ToolCall
from ctpo_megatron.data.records import NoVerdict, Unreachable
from ctpo_megatron.environments import (
    THINK_CLOSE,
    Episode,
    MessageTemplate,
    ModelTurn,
    PythonTool,
    TokenizerError,
    Tool,
    Toolbox,
    ToolEnvironment,
    ToolUnavailable,
    episode_limits,
    example_call,
    left_open,
    make_parser,
    play,
    stop_token_ids,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ctpo_megatron.data import Trajectory

FIRST_CALL_TIMEOUT_S = 15.0
"""For the sandbox to run an example call of the parser."""
_NO_ANSWER = "I do not know."
_FAILURES = ("exception", "crash", "timeout")
"""Causes of no verdict that are no word of the function's own."""


@dataclass
class FirstTrajectory:
    """What came of it. parts: (title, text) of its turns, outputs and reward, in their order."""

    problems: list[Problem] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)

    def warn(self, key: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(key, message, fix, severity="warning"))


class _Script:
    """Stands for the engine: says one text after another, each with an end token."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, end: int) -> None:
        self._turns = [[*tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in texts]

    async def __call__(self, token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int = 0) -> ModelTurn:
        ids = self._turns.pop(0)[:max_tokens]
        return ModelTurn(ids, [0.0] * len(ids), [0] * len(ids))


def play_first(config: Config, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> FirstTrajectory:
    """Play an episode over `prompt`, whose turns are the parser's example call and the ground truth in a box.

    The call runs in the run's sandbox, or in one of the same settings that ends with this. Its output is rendered as
    the engines render it, and the answer is scored. Without the tool `python`, with a parser that has no example, or
    with one turn, nothing is called. An environment or an agent of the user's is not played.
    """
    found = FirstTrajectory()
    environment = config.rollout.environment
    if environment.is_path or environment.name == "endpoint":
        found.parts.append(("not played", f"rollout.environment: {environment} plays its own episodes"))
        return found
    activate(config.extensions.path or ())
    try:
        with _toolbox(config) as tools:
            trajectory = _play(config, tokenizer, prompt, tools, found)
    except ToolUnavailable as error:
        found.warn("sandbox", f"the first call was not tried: {error}")
        return found
    except (TokenizerError, ExtensionError, ValueError) as error:
        found.problems.append(Problem("rollout", f"the first trajectory cannot be played: {error}"))
        return found
    _check_call(trajectory.tool_calls, found)
    _score(config, prompt, trajectory, found)
    return found


@contextmanager
def _toolbox(config: Config) -> Iterator[Toolbox]:
    """The code interpreter alone, and the parser: other tools are the user's, and may cost something.

    Raises ToolUnavailable where no sandbox starts.
    """
    tools, settings, parser = list[Tool](), config.sandbox, make_parser(config.rollout)
    with ExitStack() as stack:
        if config.rollout.needs_sandbox:
            url = _start_sandbox(settings, stack) if settings.url is None else settings.url
            # A dry run does not wait for as long as a run does.
            bounded = settings.model_copy(update={"request_timeout_s": FIRST_CALL_TIMEOUT_S})
            tools.append(PythonTool(bounded, url, 1))
        yield Toolbox(tools, parser, config.rollout.max_observation_chars)


def _start_sandbox(settings: SandboxConfig, stack: ExitStack) -> str:
    """The URL of a sandbox that ends with the stack. Raises ToolUnavailable."""
    try:
        from ctpo_sandbox import Limits, SandboxStartError

        return stack.enter_context(trial_sandbox(Limits.of(settings), settings.require)).url
    except ImportError as error:
        raise ToolUnavailable(f"the sandbox does not import: {error}") from error
    except SandboxStartError as error:
        raise ToolUnavailable(f"no sandbox starts here: {error}") from error


def _play(
    config: Config, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, tools: Toolbox, found: FirstTrajectory
) -> Trajectory:
    rollout = config.rollout
    stops = stop_token_ids(tokenizer, config.model.path)
    codec = MessageTemplate(tokenizer, config.model.chat_template_kwargs, sorted(stops), tools.schemas)
    parser = make_parser(rollout)
    calls = bool(tools.schemas) and rollout.max_turns > 1 and hasattr(parser, "example")
    close = f"{THINK_CLOSE}\n\n" if left_open(codec.decode(prompt.token_ids[-8:])) else ""
    texts = [f"The answer is \\boxed{{{prompt.answer}}}."]
    if calls:
        texts.insert(0, example_call(parser)[0])
    texts = [close + text for text in texts]
    from ctpo_megatron.data import Trajectory  # it loads numpy

    trajectory = Trajectory(prompt.id, 0, 0)
    limits = episode_limits(rollout, config.data)
    script: Any = _Script(texts, tokenizer, min(stops))
    episode = Episode(prompt, trajectory, engine=script, codec=codec, tools=tools, limits=limits)
    asyncio.run(play(ToolEnvironment(), episode))
    found.parts += _texts(trajectory, codec)
    if trajectory.finish_reason != "answer":
        found.warn(
            "rollout",
            f"an example call and an answer already end with {trajectory.finish_reason!r}",
            "raise max_response_tokens, max_turn_tokens or max_turns",
        )
    return trajectory


def _texts(trajectory: Trajectory, codec: MessageTemplate) -> Iterator[tuple[str, str]]:
    """What the model said and was shown, in the order of the tokens."""
    tokens = zip(trajectory.token_ids, trajectory.turn, trajectory.response_mask, strict=True)
    for (turn, sampled), part in groupby(tokens, key=lambda each: each[1:]):
        if turn > 0:
            yield "model" if sampled else "output", codec.decode([token for token, *_ in part])


def _check_call(calls: Sequence[ToolCall], found: FirstTrajectory) -> None:
    """The example of a parser is a program that succeeds."""
    for call in calls:
        if call.status != "success":
            output = (
                repr(call.output[-300:]) if call.output else "its output has no room in rollout.max_response_tokens"
            )
            message = f"the example call of rollout.tool_parser ends with {call.status}: {output}"
            fix = "repair the example, or what it calls: the model learns to call a tool from both"
            found.problems.append(Problem("rollout.tools", message, fix))


def _score(config: Config, prompt: Prompt, trajectory: Trajectory, found: FirstTrajectory) -> None:
    """The ground truth in a box earns more than no answer; a function of the user's may read another form of answer."""
    from ctpo_megatron.data import Group  # it loads numpy, as all that reads rows
    from ctpo_megatron.rewards import RewardPool

    if trajectory.finish_reason != "answer":
        return
    blank = replace(trajectory, sample_index=1, final_text=_NO_ANSWER, tool_calls=[])
    settings = config.reward.model_copy(update={"workers": 1})
    with RewardPool(settings, config.extensions.path or ()) as pool:
        asyncio.run(pool.score([Group(prompt, [trajectory, blank])]))
    right, without = trajectory.reward, blank.reward
    found.parts.append(("reward", f"{right} for the ground truth in a box, {without} for no answer"))
    special = settings.by_source.get(prompt.data_source)
    function, key = special or settings.function, f"reward.by_source.{prompt.data_source}"
    failed = [why for each in (trajectory, blank) if (why := each.no_verdict) and why.cause in _FAILURES]
    if failed:
        worst = min(failed, key=_may_pass)
        found.problems.append(_failure(key if special else "reward.function", function, worst))
        return
    if right is not None and right > (0.0 if without is None else without):
        return
    message = f"the ground truth {prompt.answer!r} in a box earns {right} by {function}, no answer {without}"
    built_in = not function.is_path
    found.problems.append(
        Problem(
            "reward.function",
            message,
            "see what the function reads" if built_in else "ignore this where it reads another form of answer",
            severity="error" if built_in else "warning",
        )
    )


def _may_pass(why: NoVerdict) -> bool:
    return why.cause == "timeout" or isinstance(why, Unreachable)


def _failure(key: str, function: Extension, why: NoVerdict) -> Problem:
    """The problem of a reward function without a verdict: a warning where only its server was not reached."""
    from ctpo_megatron.rewards import WORDS, adapter_for

    message = f"{function} gives no verdict on the first trajectory: {why.reason}"
    if _may_pass(why):
        given = (str(value) for _, value in flattened(function.arguments) if "://" in str(value))
        address = "" if "://" in why.reason else ", ".join(given)
        message += f"; its arguments name {address}" if address else ""
        fix = "start what it asks before the run, or "
        fix += "raise reward.timeout_s" if why.cause == "timeout" else "correct its address"
        return Problem(key, message, fix, severity="warning")
    fix = adapter_for(load(WORDS.get(function.name, function.name))) or "correct the function, and try again"
    return Problem(key, message, fix)
