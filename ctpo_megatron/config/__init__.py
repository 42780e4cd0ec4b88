"""Config: the schema, and loading of YAML files with dotted overrides. No torch. Rules between keys need no machine.

config = load_config("configs/quickstart.yaml", ["run.seed=1"])        # ConfigError names every mistake at once
"""

from ctpo_megatron.config.data_schema import DataConfig
from ctpo_megatron.config.extension import Extension, named_extensions
from ctpo_megatron.config.hub import HubName
from ctpo_megatron.config.keys import flattened, known_keys, short_names, with_defaults
from ctpo_megatron.config.load import (
    Sources,
    dump,
    load_config,
    load_with_sources,
    stored_settings,
)
from ctpo_megatron.config.model_directory import (
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
    STD_EPSILON,
    AdvantageConfig,
    CorrectionConfig,
    ObjectiveConfig,
    PrefixBudget,
    RejectConfig,
)
from ctpo_megatron.config.peers import NO_DEFAULT, PeerKey, peer_table
from ctpo_megatron.config.placement import (
    NEED_TE,
    Device,
    Job,
    Placement,
    against_shared_prefixes,
    available_cores,
    choose_transport,
    engine_count,
    evaluates,
    needs_engines,
    node_ranks,
    rank_problem,
    sequence_multiple,
    shares_gpus,
    world_size,
)
from ctpo_megatron.config.policy_rules import layout_problems, prefix_note
from ctpo_megatron.config.problems import (
    NO_VALUE,
    ConfigError,
    Problem,
    Severity,
    accepted,
    error,
    failed,
    passed,
    value_of,
    warning,
)
from ctpo_megatron.config.removed import command_advice, without_removed
from ctpo_megatron.config.resolved_objective import resolved_objective
from ctpo_megatron.config.rollout_rules import check_tokens
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
from ctpo_megatron.config.rules import check_sampling, check_training
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
from ctpo_megatron.config.texts import (
    SystemPrompt,
    chat_template_names,
    chat_template_text,
    run_chat_template,
    system_prompt_text,
)
