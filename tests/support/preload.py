"""Imported once by the server of test processes: what most of them need."""

import openai  # noqa: F401
import pyarrow
import scipy.stats  # noqa: F401
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import ctpo_megatron.policy
import ctpo_megatron.train
import ctpo_megatron.verify  # noqa: F401

pyarrow.array([0])  # its first array imports pandas
