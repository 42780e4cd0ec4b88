"""Every constant of time of the rollouts, in seconds. Deadlines that users set are keys of `rollout`."""

TICK_S = 1.0  # longest wait of a tick, and so how often a waiting thread checks the stop signal
AHEAD_TICK_S = 0.1  # the same of the thread that samples ahead: what was published meanwhile is submitted after it
SCORING_TICK_S = 0.02  # the same while groups are scored
PAUSE_S = 0.5  # before a failed group is tried again; it doubles with each failure
LONGEST_PAUSE_S = 10.0  # up to this
JOIN_TIMEOUT_S = 30.0  # for a thread to end when the run does
FETCH_TIMEOUT_S = 60.0  # for a complete group to arrive from its engine's node
