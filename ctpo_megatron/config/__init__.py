"""Config: schema, YAML files with dotted overrides, and the checks done before anything starts. No torch.

config = load_config("configs/quickstart.yaml", ["run.seed=1"])        # ConfigError names every mistake at once
warnings = validate(config, world_size=2, cuda=False)                  # ConfigError again; needs no torch
"""

from ctpo_megatron.config.chat_template import chat_template_names, chat_template_text, run_chat_template
from ctpo_megatron.config.checks import check, place, validate, validate_sampling
from ctpo_megatron.config.checks.directories import is_replaceable
from ctpo_megatron.config.checks.groups import check_prompts
from ctpo_megatron.config.checks.parallel import NEED_TE, check_parallel, sequence_multiple
from ctpo_megatron.config.checks.protocol import check_protocol
from ctpo_megatron.config.extension import Extension, named_extensions
from ctpo_megatron.config.gpu_memory import GpuMemory
from ctpo_megatron.config.load import dump, load_config, load_with_sources
from ctpo_megatron.config.machine import docstring_problem, has_cuda_device, temporary_problem
from ctpo_megatron.config.memory import GPU_GIB, Memory, Split, head_chunk_rows, layer_activations, stage_memory
from ctpo_megatron.config.memory import parameters as model_parameters
from ctpo_megatron.config.memory import peak as peak_memory
from ctpo_megatron.config.memory import table as memory_table
from ctpo_megatron.config.model_spec import family_for, load_family, read_shapes, read_spec, spec_for, will_be_prepared
from ctpo_megatron.config.objective import PolicyObjective, advantage_from_config, objective_from_config
from ctpo_megatron.config.objective_schema import AdvantageConfig, CorrectionConfig, ObjectiveConfig, RejectConfig
from ctpo_megatron.config.placement import Job, Placement, engine_count, shares_gpus
from ctpo_megatron.config.plan import Plan
from ctpo_megatron.config.presets import PRESETS
from ctpo_megatron.config.problems import ConfigError, Problem, Severity, passed
from ctpo_megatron.config.rollout_schema import (
    ClusterConfig,
    EngineConfig,
    PlacementConfig,
    RolloutConfig,
    SandboxConfig,
    WeightsConfig,
)
from ctpo_megatron.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ExportConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RewardConfig,
    RunConfig,
    SftConfig,
    TrackingConfig,
)
from ctpo_megatron.config.sources import Sources
from ctpo_megatron.config.system_prompt import SystemPrompt, system_prompt_text
from ctpo_megatron.config.task_schema import CorruptionConfig, PrepareConfig, TinyModelConfig
from ctpo_megatron.config.torchrun import available_cores, node_ranks, rank_problem, world_size
from ctpo_megatron.config.weight_files import Stored, stored_tensors, tokenizer_problems

__all__ = [
    "GPU_GIB",
    "NEED_TE",
    "PRESETS",
    "AdvantageConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "CorruptionConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "ExportConfig",
    "Extension",
    "GpuMemory",
    "Job",
    "Memory",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Placement",
    "PlacementConfig",
    "Plan",
    "PolicyConfig",
    "PolicyObjective",
    "PrepareConfig",
    "Problem",
    "RejectConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SandboxConfig",
    "Severity",
    "SftConfig",
    "Sources",
    "Split",
    "Stored",
    "SystemPrompt",
    "TinyModelConfig",
    "TrackingConfig",
    "WeightsConfig",
    "advantage_from_config",
    "available_cores",
    "chat_template_names",
    "chat_template_text",
    "check",
    "check_parallel",
    "check_prompts",
    "check_protocol",
    "docstring_problem",
    "dump",
    "engine_count",
    "family_for",
    "has_cuda_device",
    "head_chunk_rows",
    "is_replaceable",
    "layer_activations",
    "load_config",
    "load_family",
    "load_with_sources",
    "memory_table",
    "model_parameters",
    "named_extensions",
    "node_ranks",
    "objective_from_config",
    "passed",
    "peak_memory",
    "place",
    "rank_problem",
    "read_shapes",
    "read_spec",
    "run_chat_template",
    "sequence_multiple",
    "shares_gpus",
    "spec_for",
    "stage_memory",
    "stored_tensors",
    "system_prompt_text",
    "temporary_problem",
    "tokenizer_problems",
    "validate",
    "validate_sampling",
    "will_be_prepared",
    "world_size",
]
