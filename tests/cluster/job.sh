#!/bin/bash
#SBATCH --job-name=ctpo --nodes=2 --ntasks-per-node=1 --mem=2000 --time=30
#SBATCH --requeue --open-mode=append --signal=TERM@60
# Without nemo-run: the script of docs/cluster.md, with its paths from the environment of the test.
read -ra options <<<"$NODE_OPTIONS"
read -ra arguments <<<"$TRAINER_WORDS"
srun --kill-on-bad-exit=1 --wait=120 "$PYTHON" -m ctpo_launchers.node "${options[@]}" -- "${arguments[@]}"
status=$?
if [ "$status" -eq 143 ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
