"""A tiny random Qwen3, dense or with experts, that calls the tool and stops often, made without any training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CALL = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(1)"}}</tool_call>'
"""A whole well-formed call, which is one token of the tiny vocabulary."""

CHATML = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def tiny_tokenizer(chat_template: str = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges, ChatML and Llama-3 markers as special tokens, `CALL` as one plain token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markers += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    core.add_special_tokens(markers)
    core.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token="<|endoftext|>")
    tokenizer.chat_template = chat_template
    return tokenizer


def build_tiny_model(
    path: Path, *, seed: int = 0, favour: dict[str, float] | None = None, **overrides: Any
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Write model and tokenizer to `path`. `favour` maps a token to what is added to its logit, about.

    overrides: of the model's configuration; with `num_experts` it is a Qwen3-MoE.
    """
    tokenizer = tiny_tokenizer()
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
    }
    settings |= overrides
    experts = "num_experts" in settings
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)) if experts else Qwen3ForCausalLM(Qwen3Config(**settings))
    favour = {"<|im_end|>": 4.0, CALL: 3.0} if favour is None else favour
    with torch.no_grad():
        # All embeddings share a large component, so every hidden state does, and a head row along it is a bias.
        hidden = model.config.hidden_size
        direction = torch.nn.functional.normalize(torch.randn(hidden), dim=0)
        model.get_input_embeddings().weight.add_(4.0 * direction)
        head = model.get_output_embeddings().weight
        head[len(tokenizer) :].sub_(40.0 / hidden**0.5 * direction)  # padding rows are never sampled
        for token, logit in favour.items():
            head[tokenizer.convert_tokens_to_ids(token)].add_(logit / hidden**0.5 * direction)
        # A direction that only the call carries, and only the end token listens to: calls are mostly well-formed.
        follow = torch.nn.functional.normalize(torch.randn(hidden), dim=0)
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(CALL)].add_(8.0 * follow)
        head[tokenizer.convert_tokens_to_ids("<|im_end|>")].add_(1.5 * follow)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return tokenizer, model
