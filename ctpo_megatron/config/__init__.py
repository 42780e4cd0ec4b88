"""Config: schema, YAML files with dotted overrides, and the checks done before anything starts. No torch.

config = load_config("configs/quickstart.yaml", ["run.seed=1"])        # ConfigError names every mistake at once
warnings = validate(config, world_size=2, cuda=False)                  # ConfigError again; needs no torch
"""

from ctpo_megatron.config.check import check, validate
from ctpo_megatron.config.check_directories import is_replaceable
from ctpo_megatron.config.check_model import NEED_TE, check_parallel, sequence_multiple
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.load import dump, load_config, load_with_sources
from ctpo_megatron.config.memory import Memory, Split, layer_activations, stage_memory
from ctpo_megatron.config.memory import table as memory_table
from ctpo_megatron.config.model_spec import family_for, load_family, read_spec, spec_for
from ctpo_megatron.config.objective import PolicyObjective, objective_from_config
from ctpo_megatron.config.plan import Plan
from ctpo_megatron.config.presets import PRESETS
from ctpo_megatron.config.problems import ConfigError, Problem
from ctpo_megatron.config.schema import (
    AdvantageConfig,
    CheckpointConfig,
    Config,
    CorruptionConfig,
    DataConfig,
    EngineConfig,
    EvalConfig,
    ExportConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PolicyConfig,
    PrepareConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    SftConfig,
    TinyModelConfig,
    TrackingConfig,
)
from ctpo_megatron.config.torchrun import world_size
from ctpo_megatron.config.weight_files import Stored, stored_tensors, tokenizer_problems

__all__ = [
    "NEED_TE",
    "PRESETS",
    "AdvantageConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CorruptionConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "ExportConfig",
    "Extension",
    "Memory",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Plan",
    "PolicyConfig",
    "PolicyObjective",
    "PrepareConfig",
    "Problem",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "SftConfig",
    "Split",
    "Stored",
    "TinyModelConfig",
    "TrackingConfig",
    "check",
    "check_parallel",
    "dump",
    "family_for",
    "is_replaceable",
    "layer_activations",
    "load_config",
    "load_family",
    "load_with_sources",
    "memory_table",
    "objective_from_config",
    "read_spec",
    "sequence_multiple",
    "spec_for",
    "stage_memory",
    "stored_tensors",
    "tokenizer_problems",
    "validate",
    "world_size",
]
