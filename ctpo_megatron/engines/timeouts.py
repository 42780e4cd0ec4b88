"""Time limits and intervals of engines, in seconds. What users may set is in the configuration instead."""

from __future__ import annotations

NODE_POLL_S = 0.5
"""How often a missing Ray head or node is looked for."""
HEAD_CONNECT_S = 5.0
"""One attempt to connect to Ray's head."""

RAY_CLOSE_S = 30.0
"""Shutdown of a private Ray, which runs in a thread of its own."""
RAY_FILES_S, RAY_FILES_POLL_S = 1.0, 0.05
"""How long, and how often, the files of a private Ray are removed: its last processes may still write to them."""

LOG_COPY_INTERVAL_S = 5.0
"""Between two copies of the logs of engines that do not see the run directory."""
LOG_READ_S = 10.0
"""One read of such a log; an engine that loads its model answers late."""
LOG_CLOSE_S = 30.0
"""The last copy of all logs."""

OCCUPANCY_ROW_S = 0.25
"""Shortest time between two rows of the occupancy file."""
OCCUPANCY_REPEAT_S = 10.0
"""After which an unchanged row is repeated: it tells a long group from a run that has ended."""

CORE_SHUTDOWN_S = 2.0
"""For the current step of an engine core and the release of its model."""
IDLE_STEP_S = 0.001
"""Pause of an engine core whose requests could not be scheduled."""
