#!/bin/bash
# Written by `ctpo launch` through NeMo Run; submitted with: sbatch --requeue --parsable
#SBATCH --account=my_account
#SBATCH --comment=ctpo
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=ctpo.golden
#SBATCH --nodes=2
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
export PYTHONPATH=/nemo_run/code:/nemo_run/code/answers:/nemo_run/code/kernels:/nemo_run/code/sandbox:/nemo_run/code/launchers
export PYTHONSAFEPATH=1

srun --output /shared/ctpo/jobs/experiments/golden/golden_dry-run/golden/log-ctpo.golden_%j_"${SLURM_RESTART_COUNT:-0}".out --container-image /shared/images/ctpo-cuda.sqsh --container-mounts /shared/ctpo/jobs:/shared/ctpo/jobs,/home/me/project:/home/me/project,/shared:/shared,/shared/ctpo/jobs/experiments/golden/golden_dry-run/golden:/nemo_run --container-workdir /nemo_run/code --container-env CTPO_HOSTS,PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,WANDB_API_KEY --wait=60 --kill-on-bad-exit=1 python -m ctpo_launchers.node --workdir /home/me/project --start-timeout 1200 -- /shared/ctpo/jobs/configs/golden-DIGEST.yaml run.resume=auto
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
