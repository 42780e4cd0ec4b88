"""The tiny Qwen3 that the synthetic task starts from, written as a standard Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.config import TinyModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


def build_model(shape: TinyModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialized float32 model; equal arguments give equal weights, and global RNG state is untouched."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    multiple = shape.vocab_padding_multiple
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // multiple) * multiple,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=shape.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """config.json, generation_config.json, model.safetensors and the tokenizer files, in `directory`."""
    from transformers.utils import logging as transformers_logging

    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    transformers_logging.disable_progress_bar()  # it would break the display, for a megabyte
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
