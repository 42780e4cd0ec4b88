"""Publish, wake, sample, train on pretended GPUs: nothing is read too early, and the dry run's plan has the memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.config import Config, Job, read_spec
from ctpo_megatron.plan import (
    ASLEEP,
    GIB,
    GpuMemory,
)
from tests.rehearsal import start
from tests.rehearsal.transfer_cases import CASES, FAST, GPU_MIB, MIB, SAMPLING, SENT, TransferCase
from tests.support import ranks

RELATIVE = 0.05


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transfer")
    ranks.run(start.build_transfer_model, folder, pretend_cuda=True)
    return folder


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if c in FAST else pytest.mark.slow) for c in CASES]
)
def test_a_transfer_on_pretended_gpus(case: TransferCase, model: Path, tmp_path: Path) -> None:
    """Checksums of the engine's weights are compared on the way, and rank zero is left on its stream."""
    measured, _ = ranks.run(start.rehearse_transfer, case, model, tmp_path, ranks=2, pretend_cuda=True)
    planned = plan(case.config(model, tmp_path), model)
    for whose, moments in planned.items():
        for moment, size in moments.items():
            without_gaps, _ = measured[whose][moment]
            assert without_gaps == pytest.approx(size, rel=RELATIVE), (whose, moment, measured, planned)


def plan(config: Config, model: Path) -> dict[str, dict[str, float]]:
    """Bytes of rank zero's GPU, and of the engine's own, by moment: what a rehearsal can see."""
    looked_at = {SENT, SAMPLING} if config.placement.mode == "colocated" else {SENT}
    found: dict[str, dict[str, float]] = {"trainer": {}}
    for moment in GpuMemory(config, Job(2), read_spec(model), GPU_MIB * MIB / GIB).moments:
        if moment.when in looked_at:
            whose = "trainer" if "trainer" in moment.parts else "engine"
            hidden = ASLEEP if "engine's weights" in moment.parts else 0
            found.setdefault(whose, {})[moment.when] = moment.bytes - hidden
    return found
