#!/bin/bash
#SBATCH --job-name=ctpo --nodes=2 --ntasks-per-node=1 --mem=2000 --time=30
#SBATCH --requeue --open-mode=append --signal=TERM@60
# Without nemo-run: the script of docs/cluster.md, with its paths from the environment of the test.
srun --kill-on-bad-exit=1 --wait=120 "$PYTHON" -m ctpo_launchers.node $NODE_OPTIONS -- $ARGUMENTS
status=$?
[ "$status" -ne 143 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
