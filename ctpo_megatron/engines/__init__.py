"""Engines: all vLLM engines of a run as one pool, the Ray that they run in, and how weights reach them.

`open_engines` opens an `EnginePool` as configured; `begin_ray` starts its Ray earlier. A `RolloutEngine` is one engine,
which also runs outside of Ray; `engine_setup` has what it gives vLLM. `Sampling` is the distribution to sample from.
Importing this loads neither Ray nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctpo_megatron.base.front_door import import_when_used
from ctpo_megatron.engines.engine import (
    EngineDied,
    EngineError,
    EngineSpec,
    GroupFailed,
    GroupLost,
    GroupTask,
    RolloutEngine,
)
from ctpo_megatron.engines.setup import engine_setup
from ctpo_megatron.environments import Sampling

if TYPE_CHECKING:
    from ctpo_megatron.engines.cpu.setup import yield_to_engines
    from ctpo_megatron.engines.handle import EngineHandle
    from ctpo_megatron.engines.pool import EnginePool, open_engines
    from ctpo_megatron.engines.ray_runtime import RayRuntime, begin_ray, join_ray

__getattr__ = import_when_used(__name__)
