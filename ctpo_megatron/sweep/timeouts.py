"""Every constant of time of a sweep, in seconds."""

CLOSING_S = 120.0  # for a run to close its engines and its sandbox, after `checkpoint.grace_s`
LOCK_POLL_S = 0.5  # between two attempts to lock a run directory
