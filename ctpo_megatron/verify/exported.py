"""Compares a Hugging Face directory with the Megatron model that it was exported from: `ctpo export --check`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from ctpo_megatron.config import tokenizer_problems
from ctpo_megatron.data import Trajectory
from ctpo_megatron.policy import Layout, Trainer, gather_objects

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest rounding difference of a log-prob, in nats (by policy.dtype)."""

_LENGTHS = (2, 17, 40)
_MESSAGES = [{"role": "user", "content": "What is 6 times 7?"}]


@dataclass(frozen=True)
class Finding:
    """Result of one check. detail: figures, or the problem and its fix."""

    what: str
    good: bool
    detail: str


def check_exported(directory: Path, policy: Trainer, layout: Layout, tolerance: float | None = None) -> list[Finding]:
    """Tokenizer, chat template, generation settings, every tensor, log-probs of fixed random sequences; collective.

    transformers loads the directory in float32 on rank 0, which returns the findings; other ranks return an empty list.
    tolerance: of a log-prob, in nats; None: `TOLERANCE` of the policy's dtype.
    """
    vocabulary = policy.spec.vocab_size
    draw = random.Random(0)
    count = max(len(_LENGTHS), layout.dp_size)
    sequences = [[draw.randrange(vocabulary) for _ in range(_LENGTHS[i % len(_LENGTHS)])] for i in range(count)]
    ours = _log_probs(policy, layout, sequences)
    limit = TOLERANCE[policy.config.dtype] if tolerance is None else tolerance
    tensors = _tensors(directory, policy, layout)
    if layout.rank != 0:
        return []
    disable_progress_bar()
    return [*_files(directory), tensors, _compared(directory, sequences, ours, limit)]


def _files(directory: Path) -> Iterator[Finding]:
    """Files that generation needs in addition to the weights."""
    fix = f"copy it into {directory} from the model that was trained"
    tokenizer, wrong = _tokenizer(directory)
    if wrong:
        yield Finding("tokenizer", False, f"{wrong}; {fix}")
    else:
        yield Finding("tokenizer", True, f"{type(tokenizer).__name__}, {len(tokenizer)} tokens")
        try:
            text = tokenizer.apply_chat_template(_MESSAGES, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program and may raise anything
            yield Finding("chat template", False, f"does not render ({_first_line(error)}); {fix}")
        else:
            good = _MESSAGES[0]["content"] in text
            detail = f"renders {len(text)} characters" if good else f"drops the user's message; {fix}"
            yield Finding("chat template", good, detail)
    try:
        ends = GenerationConfig.from_pretrained(directory).eos_token_id
    except (OSError, ValueError) as error:
        yield Finding("generation config", False, f"does not load ({_first_line(error)}); {fix}")
    else:
        good = ends is not None
        yield Finding("generation config", good, f"ends at token {ends}" if good else "names no eos_token_id; add one")


def _tokenizer(directory: Path) -> tuple[Any, str]:
    """The tokenizer, and its problem."""
    for problem in tokenizer_problems(directory):
        return None, problem.message
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        return None, f"does not load ({_first_line(error)})"
    text = _MESSAGES[0]["content"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return tokenizer, "" if back == text else f"makes {back!r} of {text!r}"


def _tensors(directory: Path, policy: Trainer, layout: Layout) -> Finding:
    """Compare every tensor bit for bit, one at a time."""
    where: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")) if layout.rank == 0 else ():
        with safe_open(path, "pt") as file:
            where |= dict.fromkeys(file.keys(), path)
    names: set[str] = set()
    wrong = []
    for name, tensor in policy.weights():
        names.add(name)
        if layout.rank == 0 and name in where:
            with safe_open(where[name], "pt") as file:
                found = file.get_tensor(name)
            if found.shape != tensor.shape or not torch.equal(found, tensor.cpu().to(found.dtype)):
                wrong.append(name)
        del tensor
    problems = [f"missing: {name}" for name in sorted(names - where.keys())]
    problems += [f"not in the model: {name}" for name in sorted(where.keys() - names - {"lm_head.weight"})]
    problems += [f"differs: {name}" for name in wrong]
    detail = f"{len(names)} tensors, equal bit for bit"
    if problems:
        detail = f"{len(problems)} of {len(names)}: " + ", ".join(problems[:3]) + "; export again"
    return Finding("weights", not problems, detail)


def _log_probs(policy: Trainer, layout: Layout, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Log-probs `[T - 1]` of each sequence after its first token, on every rank; collective."""
    trajectories = [Trajectory("export", number, seed=0) for number in range(len(sequences))]
    for trajectory, (first, *rest) in zip(trajectories, sequences, strict=True):
        trajectory.append_context([first], turn=0)
        trajectory.append_model(rest, [0.0] * len(rest), [0] * len(rest), turn=1)
    (mini_batch,) = policy.distribute(trajectories, None, len(trajectories))
    policy.compute_old_log_probs([mini_batch])
    own: dict[int, torch.Tensor] = {}
    for micro in mini_batch.micro_batches if layout.reports else []:
        assert micro.old_log_probs is not None  # just computed
        own |= {number: micro.old_log_probs[tokens][1:].cpu() for number, tokens in micro.places()}
    found = {number: values for part in gather_objects(own) for number, values in part.items()}
    return [found[number] for number in range(len(sequences))]


def _compared(directory: Path, sequences: list[list[int]], ours: list[torch.Tensor], tolerance: float) -> Finding:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    difference = 0.0
    with torch.no_grad():
        for ids, log_probs in zip(sequences, ours, strict=True):
            tokens = torch.tensor([ids])
            theirs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            found = float((theirs - log_probs).abs().max())
            difference = found if not found <= difference else difference  # a NaN stays
    count = sum(map(len, ours))
    detail = f"largest difference {difference:.1e} nats on {count} tokens, limit {tolerance:g}"
    return Finding("log-probs", difference <= tolerance, detail)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
