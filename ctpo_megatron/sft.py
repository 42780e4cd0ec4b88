"""The supervised stage: learning from conversations, through the same policy step as RL."""

from __future__ import annotations

from itertools import islice

from transformers import AutoTokenizer

from ctpo_megatron.config import ModelConfig, SftConfig
from ctpo_megatron.data import batches, load_conversations
from ctpo_megatron.policy import Policy, summarize_updates, supervised
from ctpo_megatron.run import Reporter


def fine_tune(config: SftConfig, model: ModelConfig, seed: int, policy: Policy, report: Reporter) -> None:
    """Train `policy` on the assistant's tokens of conversations. Collective; every rank reads the conversations.

    Raises DataError for bad files, ValueError when there are fewer conversations than one step takes.
    """
    conversations = load_conversations(
        config.data, AutoTokenizer.from_pretrained(model.path), chat_template_kwargs=model.chat_template_kwargs
    )
    policy.use_optimizer(config.optimizer, config.steps)
    stream = batches(conversations, config.conversations_per_step, seed)
    for step, batch in enumerate(islice(stream, config.steps), start=1):
        with report.phase("sft"):
            (mini_batch,) = policy.mini_batches(batch, None, config.conversations_per_step)
            metrics = summarize_updates([policy.update(mini_batch, supervised(), temperature=1.0)])
        report.log_sft(step, config.steps, metrics)
