#!/bin/bash
# Every node of the job trains, with a process for each of its GPUs. The arguments are those of `fit`:
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 examples/cluster/slurm.sh -c run.yaml --trainer.default_root_dir runs/mine
# Submit it from the clone, in a folder that all nodes share, with its .venv. 90 seconds before the
# job's time is over the run saves a checkpoint and puts the job back into the queue.
#SBATCH --job-name=lit-rlsched
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

source .venv/bin/activate
srun --kill-on-bad-exit=1 lit-rlsched fit "$@" \
    --trainer.num_nodes="$SLURM_JOB_NUM_NODES" \
    --trainer.devices="${SLURM_NTASKS_PER_NODE:-1}" \
    --trainer.strategy="${STRATEGY:-ddp}"
