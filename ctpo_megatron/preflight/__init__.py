"""Preflight: every check before something starts, each a `Check` that yields `Problem`s. No torch unless needed.

`check_start` checks a configuration and users' parts before a start, `check_dry` the data, too. `Admission` is the pass
over all rows of data, and `check_data` what a dry run says of them.
`diagnose`, `diagnose_run` and `diagnose_nodes` are `ctpo doctor`; `diagnose_node` and `RankCheck` are the same in the
ranks of a job, `ctpo launch --check`. `NodeNeeds` is what a node program starts,
`NodeComparison` what the nodes of engines have to share with the trainer's.
"""

from ctpo_megatron.preflight.admission import Admission, DataCheck, check_data, check_prompt_file
from ctpo_megatron.preflight.check import (
    Check,
    DiskNeeds,
    Gpu,
    MachineContext,
    RunContext,
    Wanted,
    failed,
    place,
    run_checks,
    warnings_of,
)
from ctpo_megatron.preflight.choice import choice_table, settled, settled_as_before
from ctpo_megatron.preflight.configuration import prefix_note, validate, validate_sampling
from ctpo_megatron.preflight.devices import gpus, has_cuda_device, torch_cuda, torch_has_cuda, visible_gpus
from ctpo_megatron.preflight.disk import check_disk, crash_line, disk_table, disk_use, held_out_prompts
from ctpo_megatron.preflight.doctor import diagnose, diagnose_node, diagnose_run, install_line, verdict
from ctpo_megatron.preflight.dry_run import ROWS, Findings, check_dry, check_start
from ctpo_megatron.preflight.extensions import check_extensions
from ctpo_megatron.preflight.first_trajectory import play_first
from ctpo_megatron.preflight.host_memory import host_table
from ctpo_megatron.preflight.machine import START_CHECKS, check_libraries, weight_bytes
from ctpo_megatron.preflight.nodes import NodeComparison, NodeNeeds
from ctpo_megatron.preflight.placement import GpuMemory
from ctpo_megatron.preflight.plan import memory_table, plan_tables
from ctpo_megatron.preflight.ranks import BETWEEN, RankCheck
from ctpo_megatron.preflight.rollout_parts import check_agent, check_environment, check_tool, check_tool_parser
from ctpo_megatron.preflight.template import check_template
