"""Checks before something starts: dry run, users' extensions, data, the first trajectory, and a machine. No torch.

`check_start` checks a configuration and extensions before a start, `check_dry` the data, too. `DataValidation` is the
pass over all rows of data. `diagnose` and `diagnose_run` are `ctpo doctor`; `diagnose_node` and `RankCheck` are the
same in the ranks of a job, `ctpo launch --check`. `NodeComparison` is what the nodes of engines have to share with
the trainer's.
"""

from ctpo_megatron.checks.data_validation import DataValidation, check_prompt_file
from ctpo_megatron.checks.devices import Gpu, gpus, has_cuda_device, torch_cuda, torch_has_cuda, visible_gpus
from ctpo_megatron.checks.doctor import (
    Wanted,
    check_builds,
    check_devices,
    check_machine,
    check_package,
    check_packages,
    diagnose,
    diagnose_node,
    diagnose_run,
    install_line,
    temporary_problem,
    verdict,
    weight_bytes,
)
from ctpo_megatron.checks.dry_run import (
    ROWS,
    DataCheck,
    check_dry,
    check_start,
    count_rows,
    validate,
    validate_sampling,
)
from ctpo_megatron.checks.extensions import (
    check_agent,
    check_environment,
    check_extensions,
    check_tool,
    check_tool_parser,
)
from ctpo_megatron.checks.first_trajectory import play_first
from ctpo_megatron.checks.nodes import NodeComparison
from ctpo_megatron.checks.ranks import (
    BETWEEN,
    RankCheck,
    check_exchange,
    compare_versions,
    nccl_transports,
    transport_finding,
)
from ctpo_megatron.checks.sandboxes import NODE, check_libraries, check_sandbox
from ctpo_megatron.checks.template import check_template
