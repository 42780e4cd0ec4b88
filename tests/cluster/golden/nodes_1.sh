#!/bin/bash
# Written by `ctpo launch` through NeMo Run; submitted with: sbatch --requeue --parsable
#SBATCH --account=my_account
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=ctpo.golden
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/sbatch_ctpo.golden_%j.out
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=TERM@180
#SBATCH --time=04:00:00

set -u
export PYTHONUNBUFFERED=1
# The node program asks for these names; a container has no scontrol.
CTPO_HOSTS="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)"
export CTPO_HOSTS
export NCCL_DEBUG=WARN
export PYTHONPATH=/shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/code:/shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/code/answers:/shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/code/kernels:/shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/code/sandbox:/shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/code/launchers
export PYTHONSAFEPATH=1

module load cuda/13.0

srun --output /shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/log-ctpo.golden_%j_"${SLURM_RESTART_COUNT:-0}".out --chdir /shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/code --wait=60 --kill-on-bad-exit=1 /shared/ctpo/.venv/bin/python -m ctpo_launchers.node --workdir /home/me/project --start-timeout 600 --interface ib0 -- /shared/ctpo/jobs/configs/golden-DIGEST.yaml run.resume=auto
status=$?

# 143: asked to end before the time limit, and everything is saved: the next job continues. 2: the request was wrong.
# Whatever else failed is tried again, 3 restarts in all. A job that was cancelled does not run any more.
again=no
[ "$status" -ne 143 ] || again=yes
if [ "$status" -ne 0 ] && [ "$status" -ne 2 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then again=yes; fi
if [ "$again" = yes ] && [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = RUNNING ]; then
    echo "status $status: requeued"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
