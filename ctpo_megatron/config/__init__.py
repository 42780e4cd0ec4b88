"""Config: the schema, and loading of YAML files with dotted overrides. No torch. Checks across keys are in `preflight`.

config = load_config("configs/quickstart.yaml", ["run.seed=1"])        # ConfigError names every mistake at once
"""

from ctpo_megatron.config.chat_template import chat_template_names, chat_template_text, run_chat_template
from ctpo_megatron.config.extension import Extension, named_extensions
from ctpo_megatron.config.load import dump, load_config, load_with_sources
from ctpo_megatron.config.memory import (
    ELEMENT_BYTES,
    GIB,
    GPU_GIB,
    USABLE,
    Memory,
    Split,
    gib,
    head_chunk_rows,
    in_flight,
    layer_activations,
    stage_memory,
    stage_parameters,
)
from ctpo_megatron.config.memory import parameters as model_parameters
from ctpo_megatron.config.memory import peak as peak_memory
from ctpo_megatron.config.model_spec import (
    PREPARED,
    family_for,
    load_family,
    read_shapes,
    read_spec,
    spec_for,
    will_be_prepared,
)
from ctpo_megatron.config.objective import PolicyObjective, advantage_from_config, objective_from_config
from ctpo_megatron.config.objective_schema import AdvantageConfig, CorrectionConfig, ObjectiveConfig, RejectConfig
from ctpo_megatron.config.parallel import NEED_TE, check_parallel, sequence_multiple
from ctpo_megatron.config.placement import Job, Placement, engine_count, shares_gpus
from ctpo_megatron.config.presets import PRESETS
from ctpo_megatron.config.problems import NO_VALUE, ConfigError, Problem, Severity, passed
from ctpo_megatron.config.rollout_schema import (
    COLDEST,
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
from ctpo_megatron.config.task_schema import LONGEST_S, CorruptionConfig, PrepareConfig, TinyModelConfig
from ctpo_megatron.config.torchrun import available_cores, node_ranks, rank_problem, world_size
from ctpo_megatron.config.weight_files import Stored, is_replaceable, stored_tensors, tokenizer_problems

__all__ = [
    "COLDEST",
    "ELEMENT_BYTES",
    "GIB",
    "GPU_GIB",
    "LONGEST_S",
    "NEED_TE",
    "NO_VALUE",
    "PREPARED",
    "PRESETS",
    "USABLE",
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
    "Job",
    "Memory",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Placement",
    "PlacementConfig",
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
    "check_parallel",
    "dump",
    "engine_count",
    "family_for",
    "gib",
    "head_chunk_rows",
    "in_flight",
    "is_replaceable",
    "layer_activations",
    "load_config",
    "load_family",
    "load_with_sources",
    "model_parameters",
    "named_extensions",
    "node_ranks",
    "objective_from_config",
    "passed",
    "peak_memory",
    "rank_problem",
    "read_shapes",
    "read_spec",
    "run_chat_template",
    "sequence_multiple",
    "shares_gpus",
    "spec_for",
    "stage_memory",
    "stage_parameters",
    "stored_tensors",
    "system_prompt_text",
    "tokenizer_problems",
    "will_be_prepared",
    "world_size",
]
