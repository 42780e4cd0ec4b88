"""SFT conversations that show how to call the tool, corrupted so that RL has something to improve."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

from ctpo_megatron.data import ChatMessage
from examples.toolmath.families import Program, Question, run
from examples.toolmath.settings import Corruption, EarlyChoice


def hermes(code: str, output: str) -> list[ChatMessage]:
    """A call of the code interpreter and its answer in the format of `rollout.tool_parser: hermes`."""
    call = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return [
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": output},
    ]


def fenced(code: str, output: str) -> list[ChatMessage]:
    """The same in the format of `rollout.tool_parser: fenced`."""
    shown = f"The program printed:\n{output}" if output else "The program printed nothing."
    return [{"role": "assistant", "content": f"```python\n{code}\n```"}, {"role": "user", "content": shown}]


PROTOCOLS: dict[str, Callable[[str, str], list[ChatMessage]]] = {"hermes": hermes, "fenced": fenced}


def conversation(
    problem: Question,
    corruption: Corruption,
    rng: Random,
    tool_parser: str = "hermes",
    choice: EarlyChoice | None = None,
) -> list[ChatMessage]:
    """Return a conversation about `problem`, each kind of spoiling drawn independently with its own probability.

    choice: for a question with an early choice.

    An observation is the interpreter's output without the final newline: the value of the called program, right or
    wrong, or nothing if print() was forgotten. After an empty observation the answer is a guess.
    """
    spoiled = {name: rng.random() < getattr(corruption, name) for name in ("guess", "no_print", "no_box")}
    program = _choose_program(problem, corruption, rng) if choice is None else _choose_route(problem, choice, rng)
    messages: list[ChatMessage] = [{"role": "user", "content": problem.question}]
    answer = _guess(rng)
    if not spoiled["guess"]:
        results = run(program, problem.numbers)
        for code, output in _calls(program, problem.numbers, results, forget_print=spoiled["no_print"]):
            messages += PROTOCOLS[tool_parser](code, output)
        answer = answer if spoiled["no_print"] else results[-1]
    final = f"The answer is {answer}." if spoiled["no_box"] else f"The answer is \\boxed{{{answer}}}."
    return [*messages, {"role": "assistant", "content": final}]


def _choose_program(problem: Question, corruption: Corruption, rng: Random) -> Program:
    common, rare = problem.family.wrong
    draw = rng.random()
    if draw < corruption.wrong_common:
        return common
    return rare if draw < corruption.wrong_common + corruption.wrong_rare else problem.family.right


def _choose_route(problem: Question, choice: EarlyChoice, rng: Random) -> Program:
    """First and second call, drawn independently of each other."""
    lesser, better = problem.family.lesser, problem.family.right
    assert lesser is not None, f"{problem.family.name} has no early choice"
    first = lesser if rng.random() < choice.lesser else better
    second = lesser if rng.random() < choice.usual else better
    return first[0], second[1]


def _calls(
    program: Program, numbers: dict[str, int], results: list[int], *, forget_print: bool
) -> Iterator[tuple[str, str]]:
    """The code of each call, and its output."""
    for turn, (expression, result) in enumerate(zip(program, results, strict=True)):
        # Only the last call may print nothing: the second call needs the output of the first.
        printed = not (forget_print and turn == len(program) - 1)
        names = {**numbers, "s": results[turn - 1]} if turn else numbers
        yield expression.code(names, printed=printed), str(result) if printed else ""


def _guess(rng: Random) -> int:
    """A number of one to four digits, every length equally likely."""
    digits = rng.randint(1, 4)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
