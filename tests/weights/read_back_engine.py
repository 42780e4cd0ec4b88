"""Reads weights back from real engines of the installed vLLM: `python -m tests.weights.read_back_engine`, a minute.

One engine for each model takes two updates over TCP. What its layers compute with is then compared with what was sent,
and with tensors that differ in a way that loads without complaint.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ctpo_megatron.engines import EngineSpec, RolloutEngine
from ctpo_megatron.engines.weights import TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import different
from tests.engines.pool_helpers import make_config
from tests.engines.tiny_model import build_tiny_model
from tests.weights.readback import differences
from tests.weights.sides import ONE_RANK, manifest_of

ADDRESS = "127.0.0.1"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {"dense": {}, "tied": {"tie_word_embeddings": True}, "experts": EXPERTS}
Tensors = dict[str, torch.Tensor]


def _of_worker(worker: Any, compare: Callable[[torch.nn.Module], Any]) -> Any:
    return compare(worker.get_model())


Planted = Callable[[Tensors], Tensors]


async def read_back(folder: Path, settings: dict[str, Any], planted: dict[str, Planted]) -> dict[str, Any]:
    """Return `wrong` and `missing` names after updates of an engine, and the wrong ones of each planted difference.

    settings: of a tiny model. planted: names, and what makes other tensors of those that were sent.
    """
    build_tiny_model(folder / "model", **settings)
    tensors = load_file(folder / "model" / "model.safetensors")
    config = make_config(folder / "model", folder, tools=[])
    engine = RolloutEngine(0, EngineSpec(config, "unused", folder), ADDRESS)
    try:
        facts = await engine.start()
        transport = open_transport(ONE_RANK, facts, TransportSettings(1 << 16, 60.0), manifest_of(tensors), None)
        with ThreadPoolExecutor(1) as pool:
            for version in (1, 2):
                tensors = {name: tensor + 0.01 for name, tensor in tensors.items()}
                message = transport.announce(version)
                assert message is not None
                sending = pool.submit(transport.send, tensors.items(), version)
                await engine.start_weight_update()
                await engine.receive_weights(message)
                [received] = await engine.finish_weight_update(version)
                if wrong := different(sending.result(), received):
                    return {"wrong": wrong, "missing": [], "planted": {}}
        transport.close()
        compared: dict[str, list[tuple[list[str], list[str]]]] = {}
        for name, change in {"": dict, **planted}.items():
            compare = partial(_of_worker, compare=partial(differences, sent=change(tensors)))
            compared[name] = await engine._llm.collective_rpc(compare)
        wrong, missing = ([name for worker in compared[""] for name in worker[n]] for n in (0, 1))
        found = {name: worker[0] for name, (worker, *_) in compared.items() if name}
        return {"wrong": wrong, "missing": missing, "planted": found}
    finally:
        with suppress(TimeoutError):  # as of the pool: a slow end is no failure
            await engine.shutdown()


EXPERT = "model.layers.1.mlp.experts.2."
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "model.layers.0.self_attn.k_proj.weight": lambda rows: rows[[1, 0, *range(2, len(rows))]],
    "model.layers.1.self_attn.o_proj.weight": lambda rows: rows.flip(1),
    "model.layers.1.mlp.gate.weight": lambda rows: rows.flip(0),
    f"{EXPERT}gate_proj.weight": lambda stale: stale - 1e-4,
    f"{EXPERT}up_proj.weight": lambda stale: stale - 1e-4,
    f"{EXPERT}down_proj.weight": lambda stale: stale - 1e-4,
    "model.layers.1.self_attn.q_norm.weight": lambda numbers: numbers.flip(0) + torch.arange(len(numbers)) * 1e-3,
    "model.embed_tokens.weight": lambda rows: rows.roll(1, 0),
    "lm_head.weight": lambda rows: rows.roll(1, 0),
}
"""What a model would keep that an update has left behind, or put in another order: each loads without complaint."""


def _planted(name: str) -> Planted:
    return lambda tensors: tensors | {name: CHANGES[name](tensors[name])}


def main() -> int:
    """Print one line of JSON for the model of this name, or for each; returns 1 if something cannot be read back."""
    if not sys.argv[1:]:  # vLLM makes one engine in a process
        command = [sys.executable, "-m", "tests.weights.read_back_engine"]
        return max(subprocess.run([*command, name], check=False).returncode for name in MODELS)
    name, output = sys.argv[1], os.dup(1)  # an engine sends its output to its log
    planted = {each: _planted(each) for each in CHANGES} if MODELS[name] is EXPERTS else {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(read_back(Path(folder), MODELS[name], planted))
    except BaseException:
        os.write(output, traceback.format_exc().encode())
        raise
    os.write(output, (json.dumps({"model": name} | result) + "\n").encode())
    return int(bool(result["wrong"] or result["missing"]))


if __name__ == "__main__":
    sys.exit(main())
