"""`python -m ctpo_answers`, and what importing the package costs."""

from __future__ import annotations

import doctest
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from child_judge import scaled

import ctpo_answers
from ctpo_answers import read_as
from ctpo_answers.__main__ import main

ROOT = Path(ctpo_answers.__file__).parents[1]


@pytest.mark.parametrize(
    ("gold", "answer", "status", "lines"),
    [
        (r"\frac12", "0.5", 0, ["score         1", "ground truth  number: 1/2", "answer        number: 1/2"]),
        ("-1/2", r"-\frac{3}{5}", 1, ["score         0", "ground truth  number: -1/2", "answer        number: -3/5"]),
        (
            "10 km/h",
            r"First \boxed{3}, then \boxed{10{,}000 \text{ m/h}}.",
            0,
            ["score         1", "ground truth  quantity: 10 km/h", "answer        quantity: 10000 m/h"],
        ),
        (
            "5",
            r"<think>\boxed{5}",
            1,
            ["score         0", "ground truth  number: 5", r"answer        no complete \boxed{...} after its thinking"],
        ),
        (
            "room 12",
            "12",
            2,
            [
                "score         none",
                "ground truth  words: room 12",
                "answer        number: 12",
                r"problem       the ground truth has words or signs around a number, and \boxed{12} scores 0: "
                "write the answer alone",
            ],
        ),
    ],
)
def test_verdict_readings_and_status(
    gold: str, answer: str, status: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([gold, answer]) == status
    assert capsys.readouterr().out.splitlines() == lines


def test_an_answer_that_takes_too_long_is_wrong_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    endless = r"\int_0^1 \frac{\ln(1+x^7)\sqrt{x^5+3}}{\sin(x^2)+\cos(x)} dx"
    assert main([r"\frac{\pi}{7}", endless]) == 1
    assert "more than 2 s of processor time" in capsys.readouterr().out


def test_help_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "Exit status: 0 right, 1 wrong, 2" in capsys.readouterr().out
    assert main(["5"]) == 2
    assert "two arguments are needed, got 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        *(("72", "number"), ("50\\%", "percentage"), ("10 Hz", "quantity"), ("x^2+1", "formula")),
        *(("2\\pi \\text{ cm}", "quantity"), ("abc", "product of letters"), ("\\text{Evelyn}", "words")),
        *(("CO2", "chemical formula"), ("1011_2", "number in another base"), ("(B)", "choice"), ("x=3", "named value")),
        *(("3, 5", "several answers"), ("\\{1,2\\}", "set"), ("[0,1)", "tuple or interval"), ("3:2", "ratio")),
        *(
            ("3:30 p.m.", "time of day"),
            ("2 \\text{ kg } 300 \\text{ g}", "quantity"),
            ("3 R 1", "quotient and remainder"),
        ),
    ],
)
def test_types(answer: str, kind: str) -> None:
    assert read_as(answer).kind == kind


def test_numbers_need_no_algebra_and_nothing_needs_tensors() -> None:
    code = """
import sys
from ctpo_answers import score_math
score_math(r"\\boxed{0.5}", r"\\frac12")
assert not {"sympy", "math_verify"} & set(sys.modules)
score_math(r"\\boxed{x^2}", r"x\\cdot x")
assert "sympy" in sys.modules and not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=scaled(60), check=True
    )


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(ctpo_answers.__path__)])
def test_examples_of_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(import_module(f"ctpo_answers.{name}")).failed == 0


def test_the_example_of_the_readme_runs() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    exec(readme.split("```python\n")[1].split("```")[0], {})
