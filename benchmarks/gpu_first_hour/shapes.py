"""A recipe at the shapes of its model, with random weights: `ctpo train`, two steps, trainer and engine by turns.

The whole ring at the size of a real model, with CUDA graphs: seconds of each part, and the memory that a GPU has in use
over time. Answers never end by themselves, so that every decoding step has all sequences.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.gpu_first_hour import reference
from benchmarks.gpu_first_hour.overrides import attention

STEPS, PROMPTS, SAMPLES, ANSWER = 2, 16, 4, 512
"""64 sequences at once."""
FIGURES = {
    "time/rollout": "rollout_s",
    "time/old_log_probs": "old_log_probs_s",
    "time/update": "update_s",
    "time/publish": "publish_s",
    "time/step": "step_s",
    "rollout/sync_s": "sync_s",
    "rollout/sync_bytes": "sync_bytes",
    "mismatch/log_prob_abs_max": "log_prob_abs_max",
    "mismatch/log_prob_abs_mean": "log_prob_abs_mean",
    "memory/trainer_peak_mib": "trainer_peak_mib",
}
"""Of the last step -> their names here."""
_EVERY_S, _CHANGE = 0.05, 1 / 4


def main() -> None:
    """Write the figures as JSON to `--out`; exit status of the run if it fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour.shapes", description=__doc__)
    parser.add_argument("--recipe", type=Path, default=reference.ROOT / "configs" / "qwen3_0_6b_one_gpu.yaml")
    parser.add_argument("--shapes", type=Path, default=reference.ROOT / "configs" / "models" / "qwen3_0_6b.json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: two thin layers in float32")
    parser.add_argument("--work", type=Path, required=True, help="folder for model, task and run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    answer = ANSWER if options.device == "cuda" else 32
    shutil.rmtree(options.work, ignore_errors=True)
    task = reference.quickstart(options.work, "cpu")
    model = options.work / "model"
    reference.write_model(options.shapes, model, options.device)
    write_tokenizer(Path(task.model.path), model)
    settings = [f"run.root={options.work}", "run.name=run", f"run.steps={STEPS}", f"model.path={model}"]
    settings += [f"data.train={list(map(str, task.data.train_files))}", "data.eval=[]", "data.system_prompt=''"]
    settings += ["rollout.tools=[]", "rollout.tool_parser=hermes", "rollout.max_turns=1", "eval.every=0"]
    settings += [f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"]
    settings += [f"rollout.max_response_tokens={answer}", f"policy.mini_batch_prompts={PROMPTS // 2}"]
    settings += ["reward.function=benchmarks.gpu_first_hour.reward:even", "export.enabled=false"]
    settings += ["checkpoint.every=0", "tracking.live=plain", "tracking.report=false"]
    settings += attention() if options.device == "cuda" else _small()
    began = time.monotonic()
    with _memory(options.device) as memory:
        command = [sys.executable, "-m", "ctpo_megatron.cli", "train", str(options.recipe), *settings]
        status = subprocess.run([*command, *options.overrides], check=False).returncode
    if status:
        sys.exit(status)
    for large in (model, options.work / "run" / "checkpoints"):
        shutil.rmtree(large)
    metrics = json.loads((options.work / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    figures = {name: metrics[metric] for metric, name in FIGURES.items() if metric in metrics}
    figures["decode_step_ms"] = 1e3 * figures["rollout_s"] / answer
    figures["total_s"] = time.monotonic() - began
    if memory:
        figures["used_gib_at_s"] = [(round(at - began, 1), round(used, 2)) for at, used in memory]
    options.out.write_text(json.dumps(figures) + "\n")


def write_tokenizer(source: Path, model: Path) -> None:
    """The tokenizer of a small model for a large one: words that no text yields fill its vocabulary."""
    for file in source.glob("*token*"):
        shutil.copy(file, model)
    for file in source.glob("*.jinja"):
        shutil.copy(file, model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    vocabulary.update({f"word{number}": number for number in range(size) if number not in taken})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def _small() -> list[str]:
    settings = ["policy.dtype=float32", "rollout.engine.dtype=float32", "rollout.engine.kv_cache_mb=64"]
    settings += ["rollout.engine.max_model_len=1024", "policy.offload=none", "data.max_prompt_tokens=64"]
    return [
        *settings,
        "policy.micro_batch_tokens=2048",
        "placement={mode: disaggregated, trainer_gpus: null, engine_gpus: null}",
    ]


@contextmanager
def _memory(device: str) -> Iterator[list[tuple[float, float]]]:
    """Moments and GiB in use on the GPU, whenever that has changed by a quarter of a GiB; stays empty on a CPU."""
    changes: list[tuple[float, float]] = []
    over = threading.Event()
    if device == "cpu":
        yield changes
        return
    torch.cuda.empty_cache()

    def watch() -> None:
        while not over.wait(_EVERY_S):
            free, total = torch.cuda.mem_get_info()
            used = (total - free) / 2**30
            if not changes or abs(used - changes[-1][1]) > _CHANGE:
                changes.append((time.monotonic(), used))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield changes
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
