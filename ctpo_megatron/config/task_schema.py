"""The sections of `prepare`, which builds a task, a tokenizer and a tiny model, and the base of all sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from ctpo_megatron.config.reads import Reads

LARGEST_SEED = 2**32 - 1
"""NumPy's limit, since vLLM seeds NumPy."""
LONGEST_S = 1e9
"""30 years; ten times as much exceeds the timeouts of Python and the system."""
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
Precision = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """Base of all sections: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)


class TinyModelConfig(Section):
    """Shape of the model that `prepare` builds (Qwen3, randomly initialized)."""

    hidden_size: PositiveInt = Field(default=96, description="width of the residual stream")
    num_layers: PositiveInt = Field(default=2, description="transformer layers")
    num_attention_heads: PositiveInt = Field(default=4, description="query heads")
    num_key_value_heads: PositiveInt = Field(default=4, description="key/value heads (grouped-query attention)")
    head_dim: PositiveInt = Field(default=32, description="width of one head; need not be hidden_size / heads")
    intermediate_size: PositiveInt = Field(default=256, description="width of the gated MLP")
    max_position_embeddings: PositiveInt = Field(default=512, description="longest sequence in tokens")
    tie_word_embeddings: bool = Field(default=True, description="output layer shares the embedding matrix")
    rope_theta: PositiveFloat = Field(default=100.0, description="base of the rotary embedding")
    initializer_range: PositiveFloat = Field(default=0.1, description="standard deviation of the random weights")
    vocab_padding_multiple: PositiveInt = Field(default=128, description="vocabulary is padded to a multiple of this")


class CorruptionConfig(Section):
    """How often an SFT conversation is corrupted; each kind is drawn independently."""

    guess: float = Field(default=0.15, ge=0, le=1, description="answers at once with a random number, no tool call")
    wrong_common: float = Field(
        default=0.50, ge=0, le=1, description="calls the tool with the family's usual wrong program"
    )
    wrong_rare: float = Field(default=0.08, ge=0, le=1, description="calls the tool with a rarer wrong program")
    no_print: float = Field(default=0.06, ge=0, le=1, description="forgets print(), so the observation is empty")
    no_box: float = Field(default=0.12, ge=0, le=1, description="answers without \\boxed{}")


class PrepareConfig(Section):
    """Stage (a): build the synthetic tool-arithmetic task, its tokenizer and a tiny model. Absent for real models."""

    kind: Literal["toolmath"] = Field(default="toolmath", description="which synthetic task")
    directory: Annotated[str, Reads()] = Field(
        description="receives model/, train.parquet, heldout.parquet, sft.parquet"
    )
    seed: NonNegativeInt = Field(
        default=0, le=LARGEST_SEED, description="seeds the task, the conversations and the weights"
    )
    train_prompts: PositiveInt = Field(default=4096, description="prompts in train.parquet")
    heldout_prompts: PositiveInt = Field(default=256, description="prompts in heldout.parquet")
    sft_conversations: PositiveInt = Field(default=16384, description="conversations in sft.parquet")
    tokenizer_conversations: PositiveInt = Field(default=4000, description="conversations the tokenizer is trained on")
    corruption: CorruptionConfig = CorruptionConfig()
    model: TinyModelConfig = TinyModelConfig()
