"""doctor: what a machine or a cluster lacks for training, before anything is started. No torch unless asked for.

    findings = diagnose(Wanted())                           of this machine: metadata, sizes, limits, a sandbox
    findings = diagnose(Wanted(deep=True))                  imports and collectives, too
    config_findings, wanted = diagnose_run(config, ...)     of a configuration, and what it wants of each machine
    by_node = diagnose_nodes(wanted)                        of every node of RAY_ADDRESS

A check never raises: what is wrong is a finding.
"""

from ctpo_megatron.doctor.devices import Gpu, gpus
from ctpo_megatron.doctor.findings import failed, install_line, verdict
from ctpo_megatron.doctor.machine import Wanted, weight_bytes
from ctpo_megatron.doctor.nodes import NoCluster, diagnose_nodes
from ctpo_megatron.doctor.report import diagnose
from ctpo_megatron.doctor.run import diagnose_run
from ctpo_megatron.doctor.template import check_template

__all__ = [
    "Gpu",
    "NoCluster",
    "Wanted",
    "check_template",
    "diagnose",
    "diagnose_nodes",
    "diagnose_run",
    "failed",
    "gpus",
    "install_line",
    "verdict",
    "weight_bytes",
]
