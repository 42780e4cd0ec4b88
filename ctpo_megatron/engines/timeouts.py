"""Time limits and intervals of engines, in seconds. What users may set is in the configuration instead."""

from __future__ import annotations

NODE_POLL_S = 0.5
"""How often a missing Ray head or node is looked for."""
HEAD_CONNECT_S = 5.0
"""One attempt to connect to Ray's head."""

RAY_CLOSE_S = 30.0
"""Shutdown of a private Ray, which runs in a thread of its own."""
KILLED_S = 10.0
"""For killed processes of a private Ray to end: the kernel frees their memory first."""

OCCUPANCY_ROW_S = 0.25
"""Shortest time between two rows of the occupancy file."""
OCCUPANCY_REPEAT_S = 10.0
"""After which an unchanged row is repeated: it tells a long group from a run that has ended."""

CORE_SHUTDOWN_S = 2.0
"""For the current step of an engine core and the release of its model."""

TRACE_S = 120.0
"""For engines to begin a trace, or to write it."""
PING_TIMEOUT_S = 20.0
"""For a living engine to answer a ping."""
ENGINE_CLOSE_S = 5.0
"""For an engine to clean up before its process is killed."""
NODE_VERDICT_S = 30.0
"""Until Ray reports a node dead whose processes are gone; it takes 10 to 13 s."""

POOL_CLOSE_S = 20.0
"""For a start that is under way to end when the pool closes."""
START_MARGIN_S = 5.0
"""The pool waits so much longer for Ray than Ray's own deadline, whose error names the cause."""
SLEEP_AT_STOP_S = 10.0
"""For engines to free their GPUs when the run is to stop."""
SEND_ATTEMPTS = 2
"""To send an offer of weights of which nothing is kept."""

ABORT_POLL_S = 0.25
"""How often a transfer by NCCL checks whether an engine has failed."""
SECRET_TIMEOUT_S = 10.0
"""For a connection to the weight server to send the secret."""
REFUSALS_S = 60.0
"""Between two lines about connections that the weight server refused."""
ACCEPT_PAUSE_S = 0.2
"""After a connection that could not be accepted."""
