"""Settings of the task: how many prompts and conversations, how often a conversation is corrupted, which model."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Corruption(_Settings):
    """Shares of SFT conversations that are corrupted; each kind is drawn independently.

    guess: answers at once with a random number, without the tool. wrong_common, wrong_rare: calls the tool with the
    family's usual wrong program, or with a rarer one; not with an early choice. no_print: forgets print(), so the
    observation is empty. no_box: answers without \\boxed{}.
    """

    guess: float = Field(0.15, ge=0, le=1)
    wrong_common: float = Field(0.50, ge=0, le=1)
    wrong_rare: float = Field(0.08, ge=0, le=1)
    no_print: float = Field(0.06, ge=0, le=1)
    no_box: float = Field(0.12, ge=0, le=1)

    @model_validator(mode="after")
    def _one_program(self) -> Corruption:
        if self.wrong_common + self.wrong_rare > 1:
            raise ValueError("wrong_common + wrong_rare must not exceed 1")
        return self


class EarlyChoice(_Settings):
    """Questions in which the first call decides which later answer is right, and how SFT answers them.

    worth: reward of the answer after the lesser first call; after the better one it is 1. lesser: share of the
    conversations with the lesser first call. usual: share with the second call that is right after it, whatever the
    first one was, so that SFT teaches no connection.
    """

    worth: float = Field(0.6, gt=0, lt=1)
    lesser: float = Field(0.8, ge=0, le=1)
    usual: float = Field(0.55, ge=0, le=1)


class TinyModel(_Settings):
    """Shape of the model, a Qwen3 with random weights. 32 is the smallest head that vLLM's CPU attention has.

    Short sequences: a small base of the rotary embedding makes neighbours easy to tell apart.
    """

    hidden_size: PositiveInt = 96
    num_layers: PositiveInt = 2
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 32
    intermediate_size: PositiveInt = 256
    max_position_embeddings: PositiveInt = 512
    tie_word_embeddings: bool = True
    rope_theta: PositiveFloat = 100.0
    initializer_range: PositiveFloat = 0.1
    vocab_padding_multiple: PositiveInt = 128


class Task(_Settings):
    """The whole task. tool_parser: `rollout.tool_parser`, in whose format the conversations call the tool.

    tokenizer_conversations: on which the tokenizer is trained. early_choice: other questions in place of the fourteen
    families'. The teacher of SFT is mostly wrong, so that reinforcement has something to find out.
    """

    seed: NonNegativeInt = 0
    tool_parser: Literal["hermes", "fenced"] = "hermes"
    train_prompts: PositiveInt = 4096
    heldout_prompts: PositiveInt = 256
    sft_conversations: PositiveInt = 20800
    tokenizer_conversations: PositiveInt = 4000
    corruption: Corruption = Corruption()
    early_choice: EarlyChoice | None = None
    model: TinyModel = TinyModel()
