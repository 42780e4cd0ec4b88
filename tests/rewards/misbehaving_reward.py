"""Reward functions that misbehave on request; alone in their file because every worker that is replaced imports it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from ctpo_megatron.rewards import Reward


def misbehaving(trajectory: Any, prompt: Any) -> Any:
    """Does what the final turn says."""
    text = trajectory.final_text
    if text == "hang in C":
        return float(sum(range(10**12)))
    if text == "sleep":
        time.sleep(3600)
    if text == "die":
        os._exit(3)
    if text.startswith("die unless "):
        died_before = Path(text.removeprefix("die unless "))
        if not died_before.exists():
            died_before.touch()
            os._exit(3)
        return 1.0
    if text.startswith("after "):
        while not Path(text.removeprefix("after ")).exists():
            time.sleep(0.01)
        return 1.0
    if text == "raise":
        raise KeyError("broken scorer")
    if text == "long":
        raise ValueError("word\n" * 10_000)
    if text == "half a character":
        raise ValueError("\ud800\x1b]0;title\x07")
    if text == "print":
        print("\x1b]0;title\x07")
        os.write(2, b"\x1b[2J")
        return 1.0
    if text == "login":
        raise ConnectionError("http://me:hunter2@judge:80 does not answer")
    if text in RAISED:
        raise RAISED[text]
    if text in ANSWERS:
        return ANSWERS[text]
    return float(text == prompt.answer)


async def misbehaving_async(trajectory: Any, prompt: Any) -> Any:
    """The same, awaited; it may also wait politely."""
    if trajectory.final_text == "wait for ever":
        await asyncio.Event().wait()
    if trajectory.final_text == "refuse to be cancelled":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
    return misbehaving(trajectory, prompt)


class _OwnName(str):
    """Neither a plain text nor one that another process could load."""


class _OwnError(BaseException):
    """No Exception, and it does not let itself be shown."""

    def __repr__(self) -> str:
        raise KeyboardInterrupt


RAISED: dict[str, BaseException] = {
    "cancelled": asyncio.CancelledError("by the judge's time limit"),
    "interrupt": KeyboardInterrupt("by a user"),
    "generator": GeneratorExit("of a user"),
    "own": _OwnError("of a user"),
    "exit": SystemExit("I give up"),
}
"""Each derives from BaseException alone."""

ANSWERS: dict[str, Any] = {
    "nan": float("nan"),
    "numpy nan": np.float32("nan"),
    "array nan": np.array(np.nan),
    "decimal nan": Decimal("nan"),
    "infinite": -math.inf,
    "nearly infinite": 1e308,
    "nan in a Reward": Reward(float("nan"), components={"length": 1.0}),
    "nan metric": Reward(1.0, metrics={"length": float("nan")}),
    "none in a Reward": Reward(None),
    "complex": 1j,
    "too large for a float": 10**400,
    "infinite component": Reward(1.0, components={"length": float("inf")}),
    "reserved name": Reward(1.0, metrics={"mean": 1.0}),
    "same name twice": Reward(1.0, components={"length": 1.0}, metrics={"length": 1.0}),
    "slash in a name": Reward(1.0, metrics={"a/b": 1.0}),
    "half a name": Reward(1.0, metrics={"\ud800": 1.0}),
    "escape in a name": Reward(1.0, components={"\x1b[2J": 1.0}),
    "number as a name": Reward(1.0, components={1: 1.0}),  # type: ignore[dict-item]
    "name of a class": Reward(1.0, components={_OwnName("length"): 1.0}),
    "none": None,
    "text": "good",
    "component of text": Reward(1.0, components={"length": "long"}),  # type: ignore[dict-item]
}
