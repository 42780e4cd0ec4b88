"""One weight update of a fleet's engines, as rank zero sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from ray.exceptions import RayError

from ctpo_megatron.rollout.handle import EngineHandle
from ctpo_megatron.rollout.tasks import EngineLate, WeightSyncError
from ctpo_megatron.weights import EngineWeights
from ctpo_megatron.weights.shared_file import checkpoint_names

log = logging.getLogger(__name__)


def check_complete(weights: EngineWeights, model_path: str) -> None:
    """Raises WeightSyncError when a tensor of the model is missing: engines would silently keep the old one."""
    missing = checkpoint_names(model_path) - weights.names - {"lm_head.weight"}  # absent when tied
    if missing:
        raise WeightSyncError(f"weights {weights.version} lack {len(missing)} tensors, e.g. {sorted(missing)[:3]}")


class Update:
    """Weights that all engines were told to take, at once."""

    def __init__(self, weights: EngineWeights, engines: Sequence[EngineHandle], began: float) -> None:
        """began: when the weights began to be made, on the monotonic clock."""
        self.weights, self.began = weights, began
        with ExitStack() as stack:
            offer = stack.enter_context(weights.offered())
            self._begun = [(engine, engine.begin_update(offer, weights)) for engine in engines]
            self._offered = stack.pop_all()

    def finish(self) -> tuple[list[EngineHandle], list[str]]:
        """Engines that died or are late; names of tensors that cannot be read back from the others.

        Raises WeightSyncError when an engine keeps something else than was sent.
        """
        failed, unchecked, version = [], [], self.weights.version
        with self._offered:
            for engine, update in self._begun:
                try:
                    unchecked += engine.check_update(*update, self.weights)
                except (EngineLate, RayError) as error:
                    log.warning("%s is replaced, it did not take weights %d: %s", engine.name, version, error)
                    failed.append(engine)
        return failed, list(dict.fromkeys(unchecked))


class ReadBack:
    """What of the weights cannot be read back from engines, and so is not compared: logged when it changes."""

    def __init__(self) -> None:
        self.unchecked: list[str] = []

    def note(self, unchecked: list[str]) -> None:
        """Take in the names of an update."""
        if unchecked and unchecked != self.unchecked:
            names = f"{len(unchecked)} tensors, e.g. {', '.join(unchecked[:3])}"
            log.warning("weights: cannot be read back from the engines, so not compared: %s", names)
        self.unchecked = unchecked
