"""What `ctpo train --dry-run` prints when nothing is wrong: a page of 25 lines, or with -v all keys and tables."""

from __future__ import annotations

from collections.abc import Sequence

from ctpo_megatron.base.text import say
from ctpo_megatron.checks import ROWS, DataCheck, count_rows
from ctpo_megatron.cli.console import print_table
from ctpo_megatron.config import Config, Job, dump, prefix_note, resolved_objective
from ctpo_megatron.environments import system_prompt
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan import (
    CpuCache,
    GpuMemory,
    TableRow,
    choice_table,
    crash_line,
    disk_table,
    disk_use,
    evaluations,
    free_memory,
    host_table,
    memory_table,
    settled,
)

_LINE, _HEAD = 150, 2000
"""Characters of a text on the page, and of one with -v."""


def print_plan(config: Config, job: Job, spec: ModelSpec, gpu_gib: float, *, verbose: bool) -> None:
    """Print what would run. gpu_gib: memory of a GPU; of no interest without CUDA. verbose: all keys and tables."""
    disk = disk_table(disk_use(config, spec, count_rows(config.data.eval)))
    host = host_table(config, job, spec)
    memory = [("host memory", host[-1][1], "of a node, about")]
    if job.cuda:
        memory.append(_fullest(settled(config, job, spec, gpu_gib), job, spec, gpu_gib))
    rows = [*_summary(config, job), *memory, ("disk", disk[-1][1], crash_line(config, spec))]
    if verbose:
        say(dump(config).rstrip("\n"))
    print_table("What would run", ("", "", ""), rows)
    if not verbose:
        return
    say(f"prefixes: {prefix_note(config, cuda=job.cuda)} (policy.share_prefixes: {config.policy.share_prefixes})")
    print_table(f"What is written to {config.run.directory}, expected", ("", "size", "from"), disk)
    _print_memory(config, job, spec, gpu_gib)
    about = "Memory of a node's host, about" if job.cuda else "Memory of a node on a CPU, about"
    print_table(about, ("", "size", "from"), host)
    say("\nSystem prompt", system_prompt(config.data, config.rollout).text or "none")


def _summary(config: Config, job: Job) -> list[TableRow]:
    rollout, policy, steps = config.rollout, config.policy, config.run.steps
    sft = f"{config.sft.steps:,} SFT steps, then " if config.sft else ""
    sizes = {"TP": policy.tensor_model_parallel_size, "PP": policy.pipeline_model_parallel_size}
    sizes |= {"CP": policy.context_parallel_size, "EP": policy.expert_model_parallel_size}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data parallel"
    updates = rollout.prompts_per_step // policy.mini_batch_prompts * policy.passes_per_batch
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    prompt = system_prompt(config.data, rollout)
    source = "data.system_prompt" if prompt.chosen else f"rollout.tool_parser: {rollout.tool_parser}"
    return [
        ("run", f"{steps:,} steps", f"{sft}{evaluations(config)} evaluations; {config.run.directory}"),
        ("objective", config.objective.preset, resolved_objective(config.objective)["summary"]),
        ("a step", f"{updates} updates", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples"),
        ("a sequence", f"{longest:,} tokens", "at most, prompt and response"),
        ("ranks", f"{job.world_size}", layout),
        ("system prompt", f"{len(prompt.text):,} characters", source),
    ]


def _fullest(config: Config, job: Job, spec: ModelSpec, gpu_gib: float) -> TableRow:
    moment, chosen = GpuMemory(config, job, spec, gpu_gib).fullest, config.policy.chosen
    micro_batch = f"micro-batches of {chosen.micro_batch_tokens:,} tokens, recompute: {chosen.recompute}"
    return "GPU memory", f"{moment.bytes / 2**30:.1f} of {gpu_gib:g} GiB", f"{moment.gpus} {moment.when}; {micro_batch}"


def _print_memory(config: Config, job: Job, spec: ModelSpec, gpu_gib: float) -> None:
    if not job.cuda:
        cache = CpuCache.of(config, spec, free_memory())
        why = "rollout.engine.kv_cache_mb" if config.rollout.engine.kv_cache_mb else str(cache)
        print_table("Engines on a CPU", ("", "size", "from"), [("KV cache of each", f"{cache.mb:,} MiB", why)])
        return
    if choice := choice_table(config, job, spec, gpu_gib):
        print_table("policy.micro_batch_tokens and policy.recompute", ("auto", "", "cost"), choice)
    memory = GpuMemory(settled(config, job, spec, gpu_gib), job, spec, gpu_gib)
    of_rank = memory_table(spec, memory.split, gpu_gib)
    print_table("Memory per trainer rank on CUDA, at most", ("", "size", "from"), of_rank)
    print_table(f"Memory of each GPU on CUDA, {config.placement.mode}", ("", "size", "of whom"), memory.table())


def print_data(data: DataCheck, *, full: bool) -> None:
    """Print what was read. full: all rows were."""
    if data.not_checked:
        say(f"\ndata and chat template: not checked ({data.not_checked})")
        return
    rows = "all rows" if full else f"the first {ROWS:,} rows of each file; --full: all"
    print_table(f"Data: {rows}", ("", "", ""), data.table)


def print_trajectory(parts: Sequence[tuple[str, str]], *, verbose: bool) -> None:
    """Print the first trajectory: a line for each text, or with `verbose` the texts as they are."""
    say("\nThe first trajectory, with a model from a script")
    for title, text in parts:
        say(f"[{title}] {_cut(text, _HEAD) if verbose else _cut(' '.join(text.split()), _LINE)}")


def _cut(text: str, length: int) -> str:
    return f"{text[:length]}{' ...' if len(text) > length else ''}"
