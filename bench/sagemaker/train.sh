#!/bin/bash
# Train on Amazon SageMaker: torchrun on each host starts a rank for each of its GPUs. The training toolkit in AWS's images
# runs this with its variables SM_..., and with each hyperparameter of the job as a pair of words: --batch_size 64.
set -euo pipefail
cd "$(dirname "$0")"
for wheel in *.whl; do
    if [ -e "$wheel" ]; then  # an image of your own has the package already
        pip install --quiet "./$wheel[loaders]"
    fi
done

# SM_HOSTS is ["algo-1","algo-2"]; the first by name leads
hosts=$(tr -d '[]" ' <<<"$SM_HOSTS" | tr , '\n' | sort)
line=$(grep -nx "$SM_CURRENT_HOST" <<<"$hosts")
export NCCL_SOCKET_IFNAME="$SM_NETWORK_INTERFACE_NAME" GLOO_SOCKET_IFNAME="$SM_NETWORK_INTERFACE_NAME"

options=()
while [ $# -gt 1 ]; do
    case "$2" in
        [Tt]rue) options+=("${1//_/-}") ;;
        [Ff]alse) ;;
        *) options+=("${1//_/-}=$2") ;;
    esac
    shift 2
done
exec torchrun --nnodes="$(wc -l <<<"$hosts")" --node-rank="$((${line%%:*} - 1))" --master-addr="$(sed -n 1p <<<"$hosts")" \
    --nproc-per-node="$((SM_NUM_GPUS > 0 ? SM_NUM_GPUS : 1))" --module loaders.examples.train "$SM_CHANNEL_TRAIN" \
    --out="${SAGEMAKER_BASE_DIR:-/opt/ml}/checkpoints" --resume "${options[@]}"
