"""Config: the schema, and loading of YAML files with dotted overrides. No torch. Checks across keys are in `preflight`.

config = load_config("configs/quickstart.yaml", ["run.seed=1"])        # ConfigError names every mistake at once
"""

from ctpo_megatron.config.data_schema import DataConfig
from ctpo_megatron.config.extension import Extension, named_extensions
from ctpo_megatron.config.keys import flattened, known_keys, short_names, with_defaults
from ctpo_megatron.config.load import dump, dump_differences, load_config, load_with_sources, stored_settings
from ctpo_megatron.config.memory import (
    CARD_GIB,
    ELEMENT_BYTES,
    GIB,
    GPU_GIB,
    KEPT_BLOCKS,
    KEPT_SHARE,
    SHARE,
    USABLE,
    USUAL_CARD,
    CpuCache,
    Memory,
    Split,
    cache_bytes,
    free_memory,
    gib,
    head_chunk_rows,
    in_flight,
    layer_activations,
    model_parameters,
    peak_memory,
    repeated_token_share,
    stage_memory,
    stage_parameters,
)
from ctpo_megatron.config.model_directory import (
    TOKENIZERS,
    Stored,
    check_tied,
    family_for,
    is_replaceable,
    known_shapes,
    load_family,
    read_shapes,
    read_spec,
    spec_for,
    stored_tensors,
    task_command,
    tokenizer_problems,
)
from ctpo_megatron.config.objective import PolicyObjective, advantage_from_config, objective_from_config
from ctpo_megatron.config.objective_schema import (
    PRESETS,
    AdvantageConfig,
    CorrectionConfig,
    ObjectiveConfig,
    PrefixBudget,
    RejectConfig,
    TurnRatio,
)
from ctpo_megatron.config.parallel import NEED_TE, against_shared_prefixes, check_parallel, sequence_multiple
from ctpo_megatron.config.placement import (
    Device,
    Job,
    Placement,
    available_cores,
    choose_transport,
    engine_count,
    evaluates,
    needs_engines,
    node_ranks,
    rank_problem,
    shares_gpus,
    world_size,
)
from ctpo_megatron.config.problems import NO_VALUE, ConfigError, Problem, Severity, passed
from ctpo_megatron.config.removed import command_advice, without_removed
from ctpo_megatron.config.resolved_objective import objective_line, resolved_objective
from ctpo_megatron.config.rollout_schema import (
    COLDEST,
    ClusterConfig,
    EndpointConfig,
    EngineConfig,
    PlacementConfig,
    RolloutConfig,
    SandboxConfig,
    Transport,
    WeightsConfig,
)
from ctpo_megatron.config.schema import (
    CheckpointConfig,
    Chosen,
    Config,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    Recompute,
    RewardConfig,
    RunConfig,
    SftConfig,
    TrackingConfig,
)
from ctpo_megatron.config.section import LONGEST_S
from ctpo_megatron.config.sources import Sources
from ctpo_megatron.config.texts import (
    SystemPrompt,
    chat_template_names,
    chat_template_text,
    run_chat_template,
    system_prompt_text,
)
