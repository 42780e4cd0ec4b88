"""Seed-OSS as a model family: Llama with a bias on queries, keys and values, which config.json switches."""

from dataclasses import replace

from ctpo_megatron.models import ModelFamily


class SeedOss(ModelFamily):
    architecture = "SeedOssForCausalLM"  # as config.json names it
    default_key_value_heads = 8  # where config.json leaves them out
    default_head_dim = 128
    not_supported = ("attention_out_bias", "mlp_bias")  # refused if true

    def read(self, raw):
        return replace(super().read(raw), qkv_bias=raw.get("attention_bias", True))
