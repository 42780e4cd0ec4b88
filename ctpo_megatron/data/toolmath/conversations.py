"""SFT conversations that show how to call the tool, spoiled so that reinforcement has something to repair."""

from __future__ import annotations

import json
from random import Random

from ctpo_megatron.config import CorruptionConfig
from ctpo_megatron.data.toolmath.families import Problem, Program, run

Message = dict[str, str]


def tool_call(code: str) -> str:
    """The Hermes form of one call of the code interpreter."""
    arguments = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def conversation(problem: Problem, corruption: CorruptionConfig, rng: Random) -> list[Message]:
    """One conversation about `problem`, each kind of spoiling drawn independently with its own probability.

    An observation is what the interpreter prints, without the final newline: the value of the program that was
    called, right or wrong, or nothing where print() was forgotten. After an empty one the answer is a guess.
    """
    spoiled = {name: rng.random() < getattr(corruption, name) for name in ("guess", "no_print", "no_box")}
    program = _choose_program(problem, corruption, rng)
    messages: list[Message] = [{"role": "user", "content": problem.question}]
    answer = _guess(rng)
    if not spoiled["guess"]:
        results = run(program, problem.numbers)
        messages += _calls(program, problem.numbers, results, forget_print=spoiled["no_print"])
        answer = answer if spoiled["no_print"] else results[-1]
    final = f"The answer is {answer}." if spoiled["no_box"] else f"The answer is \\boxed{{{answer}}}."
    return [*messages, {"role": "assistant", "content": final}]


def _choose_program(problem: Problem, corruption: CorruptionConfig, rng: Random) -> Program:
    common, rare = problem.family.wrong
    draw = rng.random()
    if draw < corruption.wrong_common:
        return common
    return rare if draw < corruption.wrong_common + corruption.wrong_rare else problem.family.right


def _calls(program: Program, numbers: dict[str, int], results: list[int], *, forget_print: bool) -> list[Message]:
    messages: list[Message] = []
    for turn, (expression, result) in enumerate(zip(program, results, strict=True)):
        # Only the last call may stay silent: after a silent first call nobody could write the second.
        printed = not (forget_print and turn == len(program) - 1)
        names = {**numbers, "s": results[turn - 1]} if turn else numbers
        messages.append({"role": "assistant", "content": tool_call(expression.code(names, printed=printed))})
        messages.append({"role": "tool", "content": str(result) if printed else ""})
    return messages


def _guess(rng: Random) -> int:
    """A number of one to four digits, every length equally likely."""
    digits = rng.randint(1, 4)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
