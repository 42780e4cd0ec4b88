"""The families' own arithmetic against the real interpreter, and the conversations built from it."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from random import Random

import pytest

from ctpo_megatron.config import Extension, RolloutConfig
from ctpo_megatron.data import ToolCall
from ctpo_megatron.environments import make_parser
from examples.toolmath import Corruption
from examples.toolmath.conversations import PROTOCOLS, conversation
from examples.toolmath.families import FAMILIES, draw_problem, run
from tests.support.deadlines import scaled

CLEAN = Corruption(guess=0, wrong_common=0, wrong_rare=0, no_print=0, no_box=0)
PER_FAMILY = 12


def executed(programs: list[str]) -> list[str]:
    """Standard output of every program, each run in a namespace of its own by one real interpreter."""
    driver = (
        "import contextlib, io, json, sys\n"
        "def out(code):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "        exec(code, {})\n"
        "    return text.getvalue().removesuffix('\\n')\n"
        "print(json.dumps([out(code) for code in json.load(sys.stdin)]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", driver],
        input=json.dumps(programs),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tool_calls(messages: list[dict[str, str]]) -> list[tuple[str, str]]:
    """(code, observation) of every tool call in a conversation."""
    pairs = []
    for call, observation in pairwise(messages):
        if call["role"] == "assistant" and "<tool_call>" in call["content"]:
            body = call["content"].removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
            pairs.append((json.loads(body)["arguments"]["code"], observation["content"]))
    return pairs


@pytest.mark.parametrize("corruption", [CLEAN, Corruption(), CLEAN.model_copy(update={"wrong_rare": 1.0})])
def test_observations_are_what_the_interpreter_prints(corruption):
    rng = Random(3)
    problems = [draw_problem(family, rng) for family in FAMILIES for _ in range(PER_FAMILY)]
    calls = [call for problem in problems for call in tool_calls(conversation(problem, corruption, rng))]
    assert len(calls) > len(problems) / 2
    assert executed([code for code, _ in calls]) == [observation for _, observation in calls]


def test_a_clean_trace_ends_with_the_boxed_answer():
    rng = Random(1)
    for family in FAMILIES:
        problem = draw_problem(family, rng)
        messages = conversation(problem, CLEAN, rng)
        assert messages[0] == {"role": "user", "content": problem.question}
        assert messages[-1]["content"] == f"The answer is \\boxed{{{problem.answer}}}."
        assert tool_calls(messages)[-1][1] == str(problem.answer)


def test_no_wrong_program_gives_the_right_answer():
    rng = Random(2)
    for family in FAMILIES:
        for _ in range(200):
            problem = draw_problem(family, rng)
            assert problem.answer >= 0
            assert all(run(program, problem.numbers)[-1] != problem.answer for program in family.wrong)


def test_decoys_are_not_symmetric():
    """Two families that are each other's common mistake make the choice of program a coin toss, not a lesson."""
    right = {family.right: family.name for family in FAMILIES}
    mistakes = {family.name: right.get(family.wrong[0]) for family in FAMILIES}
    for pair in (("gcd", "lcm"), ("quo", "rem")):
        assert not (mistakes[pair[0]] == pair[1] and mistakes[pair[1]] == pair[0])


def test_the_mixture_has_the_configured_rates():
    corruption = Corruption()
    rng = Random(0)
    counts = dict.fromkeys(("guess", "right", "common", "no_print", "no_box"), 0)
    total = 6000
    for index in range(total):
        problem = draw_problem(FAMILIES[index % len(FAMILIES)], rng)
        messages = conversation(problem, corruption, rng)
        counts["guess"] += len(messages) == 2
        counts["no_print"] += len(messages) > 2 and messages[-2]["content"] == ""
        counts["no_box"] += "boxed" not in messages[-1]["content"]
        observed = messages[-2]["content"] if len(messages) > 2 else ""
        counts["right"] += observed == str(problem.answer)
        counts["common"] += observed == str(run(problem.family.wrong[0], problem.numbers)[-1])
    called, spoken = 1 - corruption.guess, (1 - corruption.guess) * (1 - corruption.no_print)
    right = 1 - corruption.wrong_common - corruption.wrong_rare
    expected = {"guess": corruption.guess, "no_print": called * corruption.no_print, "no_box": corruption.no_box}
    expected |= {"right": spoken * right, "common": spoken * corruption.wrong_common}
    assert {name: count / total for name, count in counts.items()} == pytest.approx(expected, abs=0.03)


QUICKSTART = {"hermes": {"empty_output": ""}}
"""Arguments of the parser in configs/quickstart.yaml."""


@pytest.mark.parametrize("output", ["42", "", "a\nb"])
@pytest.mark.parametrize("tool_parser", ["hermes", "fenced"])
def test_a_call_is_written_as_the_parser_reads_it_and_answered_as_it_answers(tool_parser: str, output: str) -> None:
    said, answered = PROTOCOLS[tool_parser]("import math\nprint(math.gcd(12, 8))", output)
    part = Extension(name=tool_parser, arguments=QUICKSTART.get(tool_parser, {}))
    parser = make_parser(RolloutConfig(tool_parser=part))
    (request,) = parser.parse(said["content"])
    assert request.arguments == {"code": "import math\nprint(math.gcd(12, 8))"}
    (shown,) = parser.render([ToolCall(1, request.name, request.arguments, "success", output, 0.0)])
    assert (answered["role"], answered["content"]) == (shown.role, shown.content)
