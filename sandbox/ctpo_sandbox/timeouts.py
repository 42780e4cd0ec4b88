"""Constants of time and retries of the sandbox, in seconds unless the name says otherwise.

A fixed number that one call needs, and nothing else, is in that call.

Limits of a run that users set are in `records.Limits`. This module imports nothing: workers load it too.
"""

# Client: one request, over one server or several.
CONNECT_TIMEOUT_S = 2.0  # to open a TCP connection to a server
QUEUE_ALLOWANCE_S = 30.0  # how long one attempt may wait in a server's queue, in addition to the time of its run
FIRST_BACKOFF_S = 0.1  # pause after the first failure of a server; doubled with each further one
MAX_BACKOFF_S = 2.0  # longest pause after a failure, whatever Retry-After asks for
PROBE_POLL_S = 0.5  # between two readiness probes of a server that is in use
PROBE_TIMEOUT_S = 2.0  # for the answer to one probe
PROBE_MISSES = 2  # failed probes in a row after which a server counts as unavailable
HEALTH_ATTEMPT_TIMEOUT_S = 30.0  # for the harmless program that a server runs after it failed over another
SMOKE_TIMEOUT_S = 60.0  # one request of `ctpo sandbox smoke`

# HTTP server.
HEAD_TIMEOUT_S = 10.0  # to receive the head of a request
BODY_TIMEOUT_S = 60.0  # to receive the body of a request
REPLY_TIMEOUT_S = 60.0  # for a client to read what the kernel does not hold of an answer
KEEP_ALIVE_S = 30  # idle connections; longer than clients keep them, because clients must be the ones to close

# Start, stop and restart of a server.
START_ATTEMPTS = 3  # for a server, template or worker that dies while it first starts, as something may have killed it
TEMPLATE_START_SHARE = 0.8  # of the time for a server to start: its error, which names the process, comes first
START_POLL_S = 0.05  # how often a starting or stopping server is checked
STOP_TIMEOUT_S = 10.0  # from SIGINT to SIGKILL, and from SIGKILL to the end
GROUP_GRACE_S = 2.0  # for templates and workers to exit and remove their files, before SIGKILL
RESTART_PAUSE_S = 1.0  # of a server next to a trainer, after a failed start

# Templates, workers and runs.
WORKER_START_TIMEOUT_S = 15.0  # to fork a worker, and for the worker to confine itself
BACKSTOP_S = 10.0  # what a worker gets on top of the wall time of a run, and a killed process to exit
CPU_SLACK_S = 1  # what the CPU limit of a run has on top of its wall time in whole seconds
CLEANING_TIMEOUT_S = 30.0  # to remove the files of a run
RUN_ATTEMPTS = 2  # for one run, when workers are lost or runs fail by no fault of the snippet
HEALTH_RUN_TIMEOUT_S = 2.0  # of the harmless program that a worker runs after one that ended its predecessor
FORK_ATTEMPTS = 5  # for one run, while the machine has no free process: others end, so this is transient
FORK_PAUSE_S = 0.05  # before such an attempt; doubled with each
WATCH_SHORTEST_WAIT_S = 0.01  # the least time between two readings of a run's CPU clock
EXCESS_POLL_S = 0.02  # between two checks of a run for too many threads or files, at least
EXCESS_POLL_MAX_S = 0.25  # the longest pause between them: on a slow machine a check takes seconds
STOP_RUN_TIMEOUT_S = 2.0  # for the threads of a run to stand still while its files are counted
STOP_POLL_S = 0.0005  # between two checks of that
SWEEP_PATIENCE_S = 2.0  # for dying processes to let go of what is removed after them
SWEEP_POLL_S = 0.05  # between two attempts at that
GROUP_REMOVE_TIMEOUT_S = 2.0  # for the processes of a control group to exit
SELFTEST_TIMEOUT_S = 10.0  # one run of the self-test
