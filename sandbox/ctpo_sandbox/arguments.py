"""Numbers of command lines."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def positive(kind: type[Number]) -> Callable[[str], Number]:
    """Type of an argument that must be finite and above 0."""

    def parse(text: str) -> Number:
        wanted = "integer" if kind is int else "number"
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not (value > 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} is not a positive {wanted}")
        return value

    return parse
