"""A scorer that misbehaves on request; alone in its file because every worker that is replaced imports it anew."""

from __future__ import annotations

import os
import time
from pathlib import Path


def misbehaving(final_text: str, answer: str) -> float:
    """Does what `final_text` says."""
    if final_text == "hang in C":
        return float(sum(range(10**12)))
    if final_text == "sleep":
        time.sleep(3600)
    if final_text == "die":
        os._exit(3)
    if final_text.startswith("die unless "):
        died_before = Path(final_text.removeprefix("die unless "))
        if not died_before.exists():
            died_before.touch()
            os._exit(3)
        return 1.0
    if final_text.startswith("after "):
        while not Path(final_text.removeprefix("after ")).exists():
            time.sleep(0.01)
        return 1.0
    if final_text == "raise":
        raise KeyError("broken scorer")
    if final_text == "nan":
        return float("nan")
    return float(final_text == answer)
