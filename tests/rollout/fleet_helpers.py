"""What the fleet tests share: a small configuration and a scripted tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ctpo_megatron.config.schema import Config

MAX_RESPONSE, MAX_TURN = 150, 30


def make_config(path: Path, root: Path, **rollout: Any) -> Config:
    engine = {"max_model_len": 320, "max_num_seqs": 64, "dtype": "float32", "kv_cache_mb": 32, "block_size": 32}
    settings = {
        "max_turns": 3,
        "max_turn_tokens": MAX_TURN,
        "max_response_tokens": MAX_RESPONSE,
        "max_group_retries": 2,
        "start_timeout_s": 240,
        "group_timeout_s": 120,
        "engine": engine,
    }
    return Config.model_validate(
        {
            "run": {"name": "test", "root": str(root), "steps": 1},
            "model": {"path": str(path)},
            "data": {"train": ["unused"]},
            "rollout": settings | rollout,
        }
    )


def scripted_tool(flag: Path) -> Callable[[], Any]:
    """A tool that prints 1; while `flag` holds a positive number it counts it down and is unavailable instead.

    With the word "bug" in `flag` it raises what no tool should raise.
    """

    def factory() -> Any:
        async def run(code: str) -> Any:
            from ctpo_megatron.environments.tools import ToolUnavailable

            text = flag.read_text() if flag.exists() else "0"
            if text == "bug":
                raise KeyError("a bug in a user's tool")
            left = int(text)
            if left > 0:
                flag.write_text(str(left - 1))
                raise ToolUnavailable("connection refused")
            return SimpleNamespace(status="success", stdout="1\n", stderr="", wall_s=0.0)

        return run

    return factory
