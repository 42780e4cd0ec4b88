"""What the fleet tests share: a small configuration, with a scripted tool in place of the sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctpo_megatron.config.schema import Config

MAX_RESPONSE, MAX_TURN = 150, 30


HERE = Path(__file__).parent


def make_config(path: Path, root: Path, **rollout: Any) -> Config:
    """Of a fleet with the model at `path`; the file `root / "flag"` tells the scripted tool what to do."""
    engine = {"max_model_len": 320, "max_num_seqs": 64, "dtype": "float32", "kv_cache_mb": 32, "block_size": 32}
    settings = {
        "max_turns": 3,
        "max_turn_tokens": MAX_TURN,
        "max_response_tokens": MAX_RESPONSE,
        "max_group_retries": 2,
        "start_timeout_s": 240,
        "group_timeout_s": 120,
        "engine": engine,
        "tools": [{"name": "user_parts:ScriptedPython", "arguments": {"flag": str(root / "flag")}}],
    }
    return Config.model_validate(
        {
            "run": {"name": "test", "root": str(root), "steps": 1},
            "model": {"path": str(path)},
            "data": {"train": ["unused"]},
            "rollout": settings | rollout,
            "extensions": {"path": [str(HERE)]},
        }
    )
