"""Reward functions of a user, of TRL's, verl's or our form, and the module that makes one function of them.

Files are read as text: nothing of them is imported or run.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ctpo_megatron.init.prompts import InitError, UsersPrompts

Form = Literal["trl", "verl", "ours"]
WRAPPER = Path("ctpo_rewards.py")
"""The module that is written into the working directory, and its function."""
_GIVEN_BY_TRL = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class UsersReward:
    """A reward function as `--reward` names it. columns: what a function of TRL asks for by name, without a default."""

    file: Path
    name: str
    weight: float
    form: Form
    is_async: bool
    columns: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Its import path."""
        return f"{self.file.stem}:{self.name}"


def read_users_reward(text: str) -> UsersReward:
    """Reads `rewards.py:function` or `rewards.py:function=weight`. Raises InitError."""
    named, _, weight = text.partition("=")
    file, _, name = named.rpartition(":")
    if not file or not name.isidentifier():
        raise InitError(f"--reward {text}: write rewards.py:function, or rewards.py:function=weight")
    try:
        number = float(weight or 1.0)
    except ValueError:
        raise InitError(f"--reward {text}: the weight {weight!r} is not a number") from None
    path = Path(file)
    if path.suffix != ".py" or not path.stem.isidentifier() or not path.is_file():
        raise InitError(f"--reward {text}: there is no Python file {file}")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise InitError(f"--reward {text}: {file} is not valid Python: {error}") from error
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if name not in functions:
        near = difflib.get_close_matches(name, functions, 1)
        has = f"did you mean {near[0]}?" if near else f"it has {', '.join(functions) or 'no function'}"
        raise InitError(f"--reward {text}: {file} has no function {name} at its top level; {has}")
    return _read(text, path, functions[name], number)


def _read(text: str, file: Path, function: ast.FunctionDef | ast.AsyncFunctionDef, weight: float) -> UsersReward:
    given = function.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    needed = positional[: len(positional) - len(given.defaults)]
    needed += [word.arg for word, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    names = {*positional, *(word.arg for word in given.kwonlyargs)}
    is_async = isinstance(function, ast.AsyncFunctionDef)
    if "completions" in names:
        columns = tuple(name for name in needed if name not in _GIVEN_BY_TRL)
        return UsersReward(file, function.name, weight, "trl", is_async, columns)
    if "solution_str" in names:
        if strange := [name for name in needed if name not in _VERL]:
            raise InitError(f"--reward {text}: verl gives no argument {strange[0]!r}; give it a default")
        return UsersReward(file, function.name, weight, "verl", is_async)
    if len(positional) >= 2 and len(needed) <= 2:
        return UsersReward(file, function.name, weight, "ours", is_async)
    raise InitError(
        f"--reward {text}: of no known form: TRL's have `completions`, verl's `solution_str`, and ours take a "
        "trajectory and its prompt (docs/extending.md#reward)"
    )


def check_columns(rewards: Sequence[UsersReward], prompts: UsersPrompts) -> str:
    """Returns the column that functions of TRL find the ground truth in. Raises InitError for one that is not there."""
    known = {*prompts.others, prompts.columns.answer}
    unknown = sorted({name for reward in rewards for name in reward.columns if name not in known})
    if len(unknown) > 1 or (unknown and prompts.columns.answer):
        asking = next(reward.path for reward in rewards if unknown[0] in reward.columns)
        has = ", ".join(sorted(filter(None, known))) or "none"
        raise InitError(f"{asking} asks for a column {unknown[0]!r}; {prompts.file} has {has}")
    # verl's files have the ground truth in a record, without a name of its own.
    return unknown[0] if unknown else prompts.columns.answer or "answer"


def wrapper(rewards: Sequence[UsersReward], answer: str, *, is_text: bool) -> str:
    """Return the text of a module whose function `score` adds up the rewards by their weights.

    answer: the column of TRL's functions with the ground truth. is_text: whether prompts are texts for them, so that
    completions are, too.
    """
    names = [reward.name for reward in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InitError(f"--reward: two functions are called {twice[0]}; rename one of them")
    weights = ", ".join(f'"{reward.name}": {reward.weight:g}' for reward in rewards)
    forms = {reward.form for reward in rewards}
    lines = [
        '"""Adds up reward functions, for reward.function. Written by `ctpo init`: change it as you like."""',
        "",
        *sorted(f"from {reward.file.stem} import {reward.name} as {_called(reward)}" for reward in rewards),
        "",
        "from ctpo_megatron.rewards import Reward",
        "",
        f"WEIGHTS = {{{weights}}}",
        "",
        "",
        f"{'async ' * any(reward.is_async for reward in rewards)}def score(trajectory, prompt):",
        *(_trl_columns(answer, is_text) if "trl" in forms else ()),
        "    earned = {",
        *(f'        "{reward.name}": {_call(reward)},' for reward in rewards),
        "    }",
        "    earned = {name: float(value) for name, value in earned.items() if value is not None}",
        "    total = sum(WEIGHTS[name] * value for name, value in earned.items())",
        "    return Reward(total, earned) if earned else None",
    ]
    if forms - {"trl"}:
        lines += [
            "",
            "",
            "def number(result):",
            '    """The reward itself: verl\'s functions may return a record, ours a `Reward`."""',
            '    return result["score"] if isinstance(result, dict) else getattr(result, "value", result)',
        ]
    return "\n".join(lines) + "\n"


def _trl_columns(answer: str, is_text: bool) -> list[str]:
    said, asked = "trajectory.final_text", "[*prompt.messages]"
    if is_text:
        asked = 'prompt.messages[-1]["content"]'
    else:
        said = f'[{{"role": "assistant", "content": {said}}}]'
    return [
        "    row = {",
        f'        "{answer}": prompt.answer,',
        "        **prompt.extra,",
        f'        "prompts": {asked},',
        f'        "completions": {said},',
        "    }",
        "    columns = {name: [value] for name, value in row.items()}",
    ]


def _call(reward: UsersReward) -> str:
    arguments = {
        "trl": "**columns",
        "verl": "data_source=prompt.data_source, solution_str=trajectory.final_text, ground_truth=prompt.answer, "
        "extra_info=prompt.extra",
        "ours": "trajectory, prompt",
    }
    call = f"{'await ' * reward.is_async}{_called(reward)}({arguments[reward.form]})"
    if reward.form == "trl":
        return f"({call})[0]" if reward.is_async else f"{call}[0]"
    return f"number({call})"


def _called(reward: UsersReward) -> str:
    """Its name in the module, which has functions and names of its own."""
    return f"{reward.file.stem}_{reward.name}"
