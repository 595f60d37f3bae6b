#!/bin/bash
# Train on the nodes of a Slurm job: torchrun on each node starts a rank for each of its GPUs.
#
#     sbatch --nodes=4 slurm.sh /shared/data/shards /shared/runs/one --model resnet50 --epochs 90 --bf16
#
# The data and the folder of checkpoints have to be visible to all nodes (the data may be at an s3:// URL). The words
# behind them are options of `python -m loaders.examples.train`. A job that was killed, or whose time was over, goes on
# from its last checkpoint when it is submitted again with the same line.
#SBATCH --job-name=precache-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120

set -euo pipefail
if [ "$#" -lt 2 ]; then
    echo "usage: sbatch [OPTIONS OF SBATCH] $0 DATA CHECKPOINTS [OPTIONS OF THE TRAINING]" >&2
    exit 2
fi
data="$1"
checkpoints="$2"
shift 2

# Put `torchrun` of an environment with precache[loaders] into the PATH of every node here, such as by
# source /shared/venv/bin/activate

# The first node leads. Nodes may be shared with other jobs, so each job has a port of its own.
leader="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)}"
port="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"

# Slurm 22.05 and newer do not pass the job's --cpus-per-task on to srun. A task that has saved and ended must not end
# the others, which may still be saving. SLURM_PROCID is known only in the task itself.
srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 \
    bash -c 'exec torchrun --node-rank="$SLURM_PROCID" "$@"' task \
    --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --master-addr="$leader" --master-port="$port" \
    --module loaders.examples.train "$data" --out="$checkpoints" --resume "$@"
