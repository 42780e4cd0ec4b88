"""Every constant of time of a run's own parts, in seconds unless the name says otherwise.

Deadlines that users set are keys of the configuration (`run.stall_timeout_s`, `checkpoint.grace_s`).
"""

HEARTBEAT_S = 5.0  # between two heartbeats of a rank
CHILDREN_BEATS = 3  # heartbeats between two checks for processes that are stopped
STACKS_BEATS = 3  # heartbeats that the other ranks have to dump their stacks in
GIT_TIMEOUT_S = 10.0  # one git command, for environment.json
SCONTROL_TIMEOUT_S = 10.0  # one question to Slurm
TORCHRUN_GRACE_S = 30.0  # torchrun's default, from the signal that ends its ranks to SIGKILL
