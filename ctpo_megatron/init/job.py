"""The configuration that `ctpo init` prints: lengths from the model and the data, and the files that it names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ctpo_megatron.checks import has_cuda_device
from ctpo_megatron.config import SystemPrompt, read_spec
from ctpo_megatron.config.schema import ModelConfig
from ctpo_megatron.environments import chat_tokenizer
from ctpo_megatron.init.peer_file import read_peer_file
from ctpo_megatron.init.peer_job import RESPONSE_KEY, PeerJob, translated
from ctpo_megatron.init.prompts import InitError, UsersPrompts, read_users_prompts
from ctpo_megatron.init.rewards import WRAPPER, UsersReward, check_columns, read_users_reward, wrapper
from ctpo_megatron.init.trl_job import TRL
from ctpo_megatron.init.verl_job import VERL
from ctpo_megatron.models import ModelSpec

_BOXED = "Reason step by step, and end with the answer in \\boxed{}."
"""What `math_verify` reads, said to a model whose prompts do not say it."""
_RESPONSE, _LEAST_RESPONSE = 2048, 16
_STEP = 64
"""Lengths are multiples of it."""
_SAMPLED = 1000
"""Prompts whose length is measured."""
_PROMPTS, _SAMPLES, _STEPS = 16, 8, 100
_PROMPT_KEY = "data.max_prompt_tokens"
_ON_GPUS = ("placement.", "cluster.", "rollout.engine.tensor_parallel_size")
"""Keys, or the starts of keys, of a job that are left out where no GPU is."""
_RULES = {rules.peer: rules for rules in (TRL, VERL)}
_WIDEST = 60
"""Characters of a column of the table."""


@dataclass(frozen=True)
class Made:
    """What was made. text: the configuration, YAML. lines: what was found and chosen, for a person."""

    text: str
    lines: tuple[str, ...]


def make_job(model: Path, data: Path, rewards: Sequence[str], job: Path | None = None) -> Made:
    """Make a configuration, and write the files that it names into the working directory.

    rewards: `rewards.py:function` or `rewards.py:function=weight`; none: `math_verify`. job: a script or configuration
    of TRL or verl. Raises InitError, and what readers of models and data raise. Nothing is written before all is read.
    """
    given = None if job is None else read_peer_file(job)
    spec = read_spec(model)
    prompts = read_users_prompts(data)
    peer = PeerJob({}, ()) if given is None else translated(given[1], _RULES[given[0]], len(prompts.rows))
    functions = [read_users_reward(text) for text in rewards]
    answer = check_columns(functions, prompts)
    system_prompt = "" if functions or not prompts.needs_instruction("boxed") else _BOXED
    lengths = _lengths(model, prompts, system_prompt, spec, peer)
    wraps = len(functions) > 1 or any(function.form != "ours" or function.weight != 1 for function in functions)
    code = wrapper(functions, answer, is_text=prompts.columns.is_text) if wraps else ""
    if code and WRAPPER.exists() and WRAPPER.read_text(encoding="utf-8") != code:
        raise InitError(f"{WRAPPER} is there, with other contents; move it away")
    is_new = not prompts.is_ours and prompts.write(keep_others=any(function.form == "trl" for function in functions))
    if code:
        WRAPPER.write_text(code, encoding="utf-8")
    reward = f"{WRAPPER.stem}:score" if code else functions[0].path if functions else "math_verify"
    made = _configuration(model, prompts, reward, functions, system_prompt, lengths)
    left_out = [] if has_cuda_device() else [key for key in peer.settings if key.startswith(_ON_GPUS)]
    _set(made, {key: value for key, value in peer.settings.items() if key not in left_out})
    evaluations = 0 if "eval" in made["data"] else made.get("eval", {}).pop("every", 0)
    text = yaml.safe_dump(made, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return Made(
        f"# Written by `ctpo init`\n{text}",
        (*_told(prompts, is_new, functions, code, lengths), *_shown(made, peer, left_out, evaluations)),
    )


@dataclass(frozen=True)
class _Lengths:
    """In tokens. longest: of the prompts measured. too_long: how many of these are longer than `prompt`."""

    prompt: int
    response: int
    longest: int
    too_long: int
    measured: int


def _lengths(model: Path, prompts: UsersPrompts, system_prompt: str, spec: ModelSpec, peer: PeerJob) -> _Lengths:
    """The prompt that 95 of 100 rows fit into, or a job's, and a response within the model's positions, or a job's."""
    tokenizer = chat_tokenizer(ModelConfig(path=str(model)), ())
    before = SystemPrompt(system_prompt, chosen=bool(system_prompt)).before
    every = range(0, len(prompts.rows), math.ceil(len(prompts.rows) / _SAMPLED))
    asked = [before(prompts.rows[index]["prompt"]) for index in every]
    texts = [tokenizer.apply_chat_template([*said], tokenize=False, add_generation_prompt=True) for said in asked]
    counts = sorted(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    positions = spec.max_position_embeddings
    usual = _rounded_up(counts[math.ceil(0.95 * len(counts)) - 1])
    prompt = min(peer.settings.get(_PROMPT_KEY, usual), positions - _LEAST_RESPONSE)
    wanted = peer.settings.get(RESPONSE_KEY)
    if counts[0] > prompt:
        limit = f"the job allows {prompt}" if _PROMPT_KEY in peer.settings else f"the model has {positions} positions"
        raise InitError(
            f"{prompts.file}: the shortest prompt has {counts[0]} tokens, and {limit}; "
            "shorten the prompts, or take a model with more"
        )
    if wanted is not None and prompt + wanted > positions:
        raise InitError(
            f"--from: responses of {wanted} tokens after prompts of {prompt} exceed the model's {positions} positions; "
            f"give {peer.response}={positions - prompt} or less"
        )
    response = min(_RESPONSE, positions - prompt) if wanted is None else wanted
    return _Lengths(prompt, response, counts[-1], sum(count > prompt for count in counts), len(counts))


def _rounded_up(tokens: int) -> int:
    return math.ceil(tokens / _STEP) * _STEP


def _configuration(
    model: Path,
    prompts: UsersPrompts,
    reward: str,
    functions: Sequence[UsersReward],
    system_prompt: str,
    lengths: _Lengths,
) -> dict[str, Any]:
    """The sections of a job for one trainer rank, which answers in one turn and calls no tool."""
    batch = min(_PROMPTS, len(prompts.rows))
    folders = sorted({str(function.file.parent) for function in functions} - {"."})
    made: dict[str, Any] = {
        "run": {"name": _name(prompts.file), "steps": _STEPS},
        "model": {"path": str(model)},
        "data": {"train": [str(prompts.target)], "max_prompt_tokens": lengths.prompt},
        "rollout": {
            "tools": [],
            "max_turns": 1,
            "prompts_per_step": batch,
            "samples_per_prompt": _SAMPLES,
            "max_response_tokens": lengths.response,
            "engine": {"max_model_len": lengths.prompt + lengths.response},
        },
        "reward": {"function": reward},
        "policy": {"mini_batch_prompts": batch // 2 if batch % 2 == 0 else batch},
        "checkpoint": {"every": "auto", "keep_last": 2},
    }
    if lengths.too_long:
        made["data"]["overlong"] = "drop"
    if system_prompt:
        made["data"]["system_prompt"] = system_prompt
    if folders:
        made["extensions"] = {"path": [".", *folders]}
    if has_cuda_device():
        made["policy"] |= {"dtype": "bfloat16", "use_distributed_optimizer": True, "offload": "all"}
        made["placement"] = {"mode": "colocated", "trainer_gpus": 1, "engine_gpus": 1}
    return made


def _set(made: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set dotted keys."""
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = made
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value


def _told(
    prompts: UsersPrompts, is_new: bool, functions: Sequence[UsersReward], code: str, lengths: _Lengths
) -> Iterator[str]:
    columns = prompts.columns
    asked = columns.question or "prompt"
    truth = columns.answer or "reward_model"
    yield f"{prompts.file}: {len(prompts.rows):,} rows; the prompt is {asked}, the ground truth {truth}"
    if "####" in columns.made["reward_model"]:
        yield f"the ground truth is what follows #### in {columns.answer}"
    if prompts.left_out:
        yield f"{prompts.left_out:,} rows without a question or an answer are left out"
    if columns.is_text:
        yield "prompts are texts: each becomes a user's message in the model's chat template"
    if not prompts.is_ours:
        yield f"{'wrote' if is_new else 'as before:'} {prompts.target}"
    for function in functions:
        of = {"trl": "TRL's form", "verl": "verl's form", "ours": "our form"}[function.form]
        yield f"reward {function.path}: {of}, weight {function.weight:g}"
    if code:
        yield f"wrote {WRAPPER}, whose score() adds them up"
    if not functions:
        yield "reward math_verify: 1 where the last \\boxed{} equals the ground truth, else 0"
    yield f"at most {lengths.prompt:,} tokens of prompt and {lengths.response:,} of response"
    if lengths.too_long:
        yield f"{lengths.too_long:,} of {lengths.measured:,} prompts measured are longer, and will be left out"


def _shown(made: Mapping[str, Any], peer: PeerJob, left_out: Sequence[str], evaluations: int) -> Iterator[str]:
    """The job of the other trainer in three columns, the sizes of a step, and what to do next.

    left_out: keys of the job that need a GPU. evaluations: how often it evaluates without held-out prompts here.
    """
    if peer.rows:
        wide, far = (min(_WIDEST, max(len(row[column]) for row in peer.rows)) for column in (0, 1))
        if left_out:
            yield f"no GPU here: left out {', '.join(left_out)}"
        yield from (f"{theirs:<{wide}}  {ours:<{far}}  {outcome}" for theirs, ours, outcome in peer.rows)
    if evaluations:
        yield f"no evaluations without held-out prompts: give data.eval, and then eval.every: {evaluations}"
    steps, sizes = made["run"]["steps"], made["rollout"]
    yield f"{steps} steps of {sizes['prompts_per_step']} prompts x {sizes['samples_per_prompt']} samples"
    yield f"objective.preset: {made.get('objective', {}).get('preset', 'ctpo')}"
    yield "next: ctpo train THE_FILE.yaml --dry-run"


def _name(file: Path) -> str:
    """A name for the run: the file's, of letters that a run may have."""
    name = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in file.stem
    )
    return name if name.strip(".") else "mine"
