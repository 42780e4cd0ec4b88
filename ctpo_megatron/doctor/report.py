"""Everything that one machine can say of itself."""

from __future__ import annotations

import os
import platform
import sys

from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE, TOKEN_FILE
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.doctor.deep import check_collectives, check_imports
from ctpo_megatron.doctor.devices import check_devices, gpus, torch_cuda
from ctpo_megatron.doctor.machine import Wanted, check_machine
from ctpo_megatron.doctor.packages import check_packages, version_of
from ctpo_megatron.doctor.sandbox import check_sandbox


def diagnose(wanted: Wanted) -> list[Problem]:
    """Findings on this machine, for a run that wants so much of it."""
    found = gpus()
    count = 0 if isinstance(found, str) else len(found)
    findings = [
        passed("python", f"{platform.python_version()} ({sys.executable})"),
        *check_packages(cuda=count > 0),
        *check_devices(found, torch_cuda()),
        *check_machine(wanted),
        _ray(),
        *check_sandbox(wanted.sandbox),
    ]
    if wanted.deep:
        findings += check_imports()
        if version_of("torch") is not None:
            findings.append(check_collectives(count if torch_cuda() else 0))
    return findings


def _ray() -> Problem:
    address = os.environ.get(ADDRESS, "")
    if not address:
        return passed("Ray", "a private one, on this node alone (RAY_ADDRESS is not set)")
    token, mode = os.environ.get(TOKEN_FILE, ""), os.environ.get(AUTH_MODE, "")
    if mode != "token":
        fix = "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=... on every node"
        return Problem(
            "Ray",
            f"the cluster at {address}, without a token: anyone who reaches it runs code",
            fix,
            severity="warning",
        )
    if token and not os.path.isfile(token):
        return Problem("Ray", f"RAY_AUTH_TOKEN_PATH={token} is no file", "copy the cluster's token there")
    return passed("Ray", f"the cluster at {address}, with a token")
