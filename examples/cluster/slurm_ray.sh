#!/bin/bash
# The first node of the job trains, engines decode on the others. The arguments are those of `fit`:
#   sbatch --nodes=3 --gpus-per-node=8 examples/cluster/slurm_ray.sh -c run.yaml -c configs/ray_cluster.yaml
# Submit it from the clone, in a folder that all nodes share, with its .venv. If a node is lost, SLURM
# puts the job back into the queue, and it goes on in its folder from the newest checkpoint.
#SBATCH --job-name=lit-rlsched
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

source .venv/bin/activate
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token # a token of this job, which processes of this user alone can read
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN

head=$(hostname --ip-address)
head=${head%% *} # the first, if there are several
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))} # of this job
workers=$((SLURM_JOB_NUM_NODES - 1))
export RAY_ADDRESS=$head:$port

started=${RAY_TMPDIR:-${TMPDIR:-/tmp}}/ray/ray_current_cluster # written when the node has started
rm -f "$started"
ray start --head --node-ip-address="$head" --port="$port" --num-cpus=0 --num-gpus=0 \
    --include-dashboard=false --block &
ray=$!
until grep -qs ":$port\$" "$started"; do kill -0 "$ray"; sleep 1; done
# without `--ntasks`, `srun` would start as many tasks as the job has nodes
srun --relative=1 --nodes="$workers" --ntasks="$workers" --cpus-per-task="$SLURM_CPUS_ON_NODE" \
    ray start --address="$RAY_ADDRESS" --num-cpus="$SLURM_CPUS_ON_NODE" --block &
trap 'kill "$ray" "$!" 2> /dev/null || true; wait' EXIT
# It waits until the cluster has the resources. By this name of the job Lightning starts
# the ranks of one node itself, and does not take the job's nodes for those of the trainer.
SLURM_JOB_NAME=interactive lit-rlsched fit "$@"
