"""One weight update of a fleet's engines, as rank zero sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ray.exceptions import RayError

from ctpo_megatron.rollout.handle import EngineHandle
from ctpo_megatron.rollout.tasks import EngineLate, UpdateReport, WeightSyncError
from ctpo_megatron.weights import EngineWeights
from ctpo_megatron.weights.shared_file import checkpoint_names

log = logging.getLogger(__name__)


def check_complete(weights: EngineWeights, model_path: str) -> None:
    """Raises WeightSyncError when a tensor of the model is missing: engines would silently keep the old one."""
    missing = checkpoint_names(model_path) - weights.names - {"lm_head.weight"}  # absent when tied
    if missing:
        raise WeightSyncError(f"weights {weights.version} lack {len(missing)} tensors, e.g. {sorted(missing)[:3]}")


def give(weights: EngineWeights, engines: Sequence[EngineHandle]) -> tuple[list[EngineHandle], list[UpdateReport]]:
    """Give the weights to all engines at once: those that died or are late, and the reports of the others.

    Raises WeightSyncError when an engine keeps something else than was sent.
    """
    failed, reports = [], []
    with weights.offered() as offer:
        for engine, update in [(engine, engine.begin_update(offer, weights)) for engine in engines]:
            try:
                reports.append(engine.check_update(*update, weights.version))
            except (EngineLate, RayError) as error:
                log.warning("%s is replaced, it did not take weights %d: %s", engine.name, weights.version, error)
                failed.append(engine)
    return failed, reports


class ReadBack:
    """What of the weights cannot be read back from engines, and so is not compared: logged when it changes."""

    def __init__(self) -> None:
        self.unchecked: tuple[str, ...] = ()

    def note(self, reports: Sequence[UpdateReport]) -> None:
        """Take in the reports of an update."""
        found = next((report.unchecked for report in reports if report.unchecked), ())
        if found and found != self.unchecked:
            names = f"{len(found)} tensors, e.g. {', '.join(found[:3])}"
            log.warning("weights: cannot be read back from the engines, so not compared: %s", names)
        self.unchecked = found
