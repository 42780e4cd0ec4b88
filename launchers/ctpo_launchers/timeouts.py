"""Every constant of time and retries of the launchers, in seconds unless the name says otherwise.

Deadlines that users set are flags of `ctpo_launchers.node` and keys of the cluster file.
"""

# Node program and its children.
CHILD_POLL_S = 0.1  # how often children, their output and files of other nodes are checked
KILL_TIMEOUT_S = 10.0  # from SIGKILL to the end of all processes of a child
AFTER_GRACE_S = 60.0  # what a trainer gets after checkpoint.grace_s, to exit once it has saved
RAY_RESTARTS = 3  # of Ray on one node, before the node is lost

# Connections between node programs.
RETRY_S = 0.2  # between two attempts to reach node 0, or to lock the launcher's environment
HELLO_TIMEOUT_S = 10.0  # for the first message of a connection
SILENCE_S = 90  # after which the kernel reports a host as gone

# Commands on the submitting machine and on nodes.
CHECK_WAIT_S = 3600.0  # for a check to be started by Slurm and to end
CHECK_SIGNAL_S = 60  # before the end of a job that checks, Slurm says so
CHECK_POLL_S = 2.0  # between two questions whether it has
SUBMIT_COMMAND_TIMEOUT_S = 60.0  # one command of Slurm or git of `ctpo launch`
NODE_COMMAND_TIMEOUT_S = 20.0  # one Slurm command of a node program
INSTALL_TIMEOUT_S = 1800.0  # to install the launcher's environment, or to wait for another process that does
