#!/bin/bash
# Convert on the nodes of a Slurm job: a Ray cluster is started, used, and ended with the job.
#
#     sbatch --nodes=4 ray-on-slurm.sh SRC DST --format shards
#
# SRC and DST lie in folders that all nodes share. What stands behind DST are options of `precache convert`.
# A job that was killed, or whose time was over, is sent again with the same line: it goes on where it was.
#SBATCH --job-name=precache
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=08:00:00
#SBATCH --requeue

set -euo pipefail
if [ "$#" -lt 2 ]; then
    echo "usage: sbatch [OPTIONS OF SBATCH] $0 SRC DST --format FORMAT [OPTIONS]" >&2
    exit 2
fi

# What brings `precache` and `ray` into the PATH of every node, such as
# source /shared/venv/bin/activate

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}"                          # the node that runs this script
port=$((20000 + SLURM_JOB_ID % 20000))      # of its own: nodes may be shared with other jobs
export RAY_ADDRESS="$head:$port"            # what `--address auto` takes
# Else whoever reaches the port may run programs as you (Ray 2.52 and newer; srun hands it to all nodes).
RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
# Pictures never go through Ray's object store: 200 MB hold the list of each task.
options=(--num-cpus "$SLURM_CPUS_PER_TASK" --object-store-memory 200000000 --disable-usage-stats --block)

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    ray start --head --port "$port" --include-dashboard false "${options[@]}" > /dev/null &
started=("$!")
trap 'kill "${started[@]}" 2> /dev/null || true; wait' EXIT

for _ in $(seq 60); do
    if ray status --address "$RAY_ADDRESS" > /dev/null 2>&1; then
        break
    fi
    sleep 2
done

workers=$((${#nodes[@]} - 1))
if [ "$workers" -gt 0 ]; then
    # a node that comes late, or dies, is no reason to end the others
    srun --nodes="$workers" --ntasks="$workers" --exclude="$head" --overlap --kill-on-bad-exit=0 \
        ray start --address "$RAY_ADDRESS" "${options[@]}" > /dev/null &
    started+=("$!")
fi

precache convert "$@" --engine ray --address auto
