"""One weight update of a fleet's engines, as rank zero sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack

import ray
from ray.exceptions import RayError

from ctpo_megatron.engines.handle import EngineHandle
from ctpo_megatron.engines.tasks import EngineLate, WeightSyncError
from ctpo_megatron.engines.weights import EngineWeights
from ctpo_megatron.engines.weights.file import checkpoint_names

log = logging.getLogger(__name__)


def check_complete(weights: EngineWeights, model_path: str) -> None:
    """Raises WeightSyncError when a tensor of the model is missing: engines would silently keep the old one."""
    missing = checkpoint_names(model_path) - weights.names - {"lm_head.weight"}  # absent when tied
    if missing:
        raise WeightSyncError(f"weights {weights.version} lack {len(missing)} tensors, e.g. {sorted(missing)[:3]}")


class PendingUpdate:
    """Weights that all engines were told to take, at once. began: when they began to be made, monotonic clock."""

    def __init__(self, weights: EngineWeights, engines: Sequence[EngineHandle], began: float) -> None:
        self.weights = weights
        with ExitStack() as stack:
            offer = stack.enter_context(weights.offered())
            self._begun = [(engine, engine.launches, *engine.begin_update(offer, weights)) for engine in engines]
            self._offered = stack.pop_all()
        self._making_s = time.monotonic() - began

    @property
    def is_over(self) -> bool:
        """Whether every engine has answered, or is late."""
        now = time.monotonic()
        expected = [reference for _, _, reference, deadline in self._begun if deadline > now]
        return not expected or len(ray.wait(expected, num_returns=len(expected), timeout=0)[0]) == len(expected)

    def finish(self) -> tuple[list[EngineHandle], list[str], float]:
        """Engines that died or are late; names of tensors that cannot be read back from the others; seconds that the
        weights took until the last engine had them.

        An engine that was replaced meanwhile is given the weights when it is up. Raises WeightSyncError when one keeps
        something else than was sent.
        """
        failed, unchecked, version = list[EngineHandle](), list[str](), self.weights.version
        slowest_s = 0.0
        with self._offered:
            for engine, launch, reference, deadline in self._begun:
                if launch != engine.launches:
                    continue
                try:
                    names, seconds = engine.check_update(reference, deadline, self.weights)
                except (EngineLate, RayError) as error:
                    log.warning("%s is replaced, it did not take weights %d: %s", engine.name, version, error)
                    failed.append(engine)
                    continue
                unchecked += names
                slowest_s = max(slowest_s, seconds)
        return failed, list(dict.fromkeys(unchecked)), self._making_s + slowest_s


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
