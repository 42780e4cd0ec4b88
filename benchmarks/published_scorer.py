"""Our scorer `reference` against the published one that it imitates, on 297 probes.

    git clone https://github.com/horizon-llm/CTPO DIRECTORY
    PYTHONPATH=. python -m benchmarks.published_scorer DIRECTORY

33 answers to 10 ground truths, each in 9 phrasings. Prints how many verdicts are equal, and every other one. The
published code is taken from the clone as it is: nothing of it is here.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from ctpo_megatron.rewards import score_reference

ANSWERS = {
    "72": ("72", "72.0", "71", "\\$72"),
    "-5": ("-5", "5", "-5.0"),
    "080": ("80", "080", "81"),
    "\\frac{1}{2}": ("\\frac{1}{2}", "\\frac12", "0.5", "\\frac{1}{3}"),
    "1000": ("1,000", "1000", "100"),
    "2\\sqrt{3}": ("2\\sqrt{3}", "\\sqrt{12}", "2\\sqrt{5}"),
    "(1, 2)": ("(1,2)", "(1, 2)", "(2,1)"),
    "50\\%": ("50\\%", "50", "5"),
    "\\text{Evelyn}": ("\\text{Evelyn}", "Evelyn", "Eve"),
    "x^2+1": ("x^2+1", "1+x^2", "x^2-1", "x^2"),
}
"""Ground truth -> answers, right and wrong ones."""
PHRASINGS = (
    "The answer is \\boxed{{{0}}}.",
    "So we have ${0}$.",
    "Answer: {0}",
    "Answer: x = {0}",
    "The result is {0}",
    "[tool] {0}\nI do not know.",
    "\\boxed{{12345}} is wrong.\nAnswer: {0}",
    "First ${0}$, but then \\boxed{{12345}}.",
    "\\boxed{{{0}}}" + "\nand so on" * 40,
)


def probes() -> Iterator[tuple[str, str]]:
    """(ground truth, response)."""
    for truth, answers in ANSWERS.items():
        for answer in answers:
            yield from ((truth, phrasing.format(answer)) for phrasing in PHRASINGS)


def published(clone: Path) -> Callable[[str, str], float]:
    """The published function of a response and a ground truth, without the package around it."""
    for name in ("verl", "verl.utils", "verl.utils.import_utils"):
        sys.modules[name] = ModuleType(name)
    sys.modules["verl.utils.import_utils"].deprecated = lambda _: lambda function: function  # type: ignore[attr-defined]
    sys.modules["verl.utils"].__path__ = [str(clone / "verl" / "utils")]
    scorer = importlib.import_module("verl.utils.reward_score")
    return lambda text, truth: float(scorer.default_compute_score("", text, truth))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("clone", type=Path)
    theirs = published(arguments.parse_args().clone)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    verdicts = [(truth, text, score_reference(text, truth), theirs(text, truth)) for truth, text in probes()]
    differ = [verdict for verdict in verdicts if verdict[2] != verdict[3]]
    for truth, text, ours, other in differ:
        print(f"ours {ours:.0f}, published {other:.0f}: {truth!r} in {text[:60]!r}")
    print(f"{len(verdicts) - len(differ)} of {len(verdicts)} verdicts are equal")


if __name__ == "__main__":
    main()
