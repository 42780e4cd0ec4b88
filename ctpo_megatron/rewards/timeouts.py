"""Every constant of time and retries of the reward workers. The deadline of one score is `reward.timeout_s`."""

START_TIMEOUT_S = 120.0  # for all workers to start and load the reward functions
GRACE_S = 1.0  # after the deadline, for a worker to discard what it awaits, before it is killed
START_MARGIN_S = 5.0  # at least, for a worker that was killed to be replaced
WORKERS_POLL_S = 1.0  # how often a waiting thread checks that the workers are still there
WORKERS_RETRIES = 3  # how often a trajectory is given to new workers because all of them were gone
