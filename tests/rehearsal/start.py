"""Functions that ranks start with. They import late: the process of the tests itself needs no megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("qwen3-tied", "qwen3-moe")


def build_models(folder: Path) -> None:
    """A model of two layers of each family."""
    from tests.policy import models

    for family in FAMILIES:
        models.build(family, folder / family, layers=2)


def rehearse(case: Any, models_dir: Path, folder: Path) -> Any:
    """See `job.rehearse`."""
    from tests.rehearsal import job

    return job.rehearse(case, models_dir / case.family, folder)


def gpu_test(name: str, *arguments: Any) -> None:
    """A test of tests/gpu/test_policy_cuda.py."""
    from tests.gpu import test_policy_cuda

    getattr(test_policy_cuda, name)(*arguments)


def left_to_compile(case: Any, objectives: Any, models_dir: Path) -> Any:
    """See `left_to_compile.left_to_compile`."""
    from tests.rehearsal import left_to_compile as job

    return job.left_to_compile(case, objectives, models_dir / case.family)


def build_transfer_model(folder: Path) -> None:
    """The model whose weights are sent."""
    from tests.policy import models
    from tests.rehearsal.transfer_cases import SHAPE

    models.build("qwen3-tied", folder, layers=2, **SHAPE)


def rehearse_transfer(case: Any, model: Path, folder: Path) -> Any:
    """See `transfer_job.rehearse`."""
    from tests.rehearsal import transfer_job

    return transfer_job.rehearse(case, model, folder)


def count_launches(family: str, folder: Path) -> Any:
    """See `launches.count`."""
    from tests.rehearsal import launches

    return launches.count(family, folder)
