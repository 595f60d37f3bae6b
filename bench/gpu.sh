#!/usr/bin/env bash
# Measure whether the GPU of this machine waits for data, with every loader. Linux; needs no network.
#
#     bash bench/gpu.sh                       all steps
#     bash bench/gpu.sh resnet50 hardware     these steps
#
# A step is a command with a time limit. What it measures is OUT/STEP.json; where that is there, the step is not run
# again. A step that was stopped has its trials in OUT/unfinished: run the same line again, and it goes on from them.
# To measure a step anew, remove its file. OUT/page.html shows them all. The exit code is 1 where a step has no result.
#
# PYTHON    that has torch and what pyproject.toml names (python3)
# DEVICE    cuda, or cpu: the same steps in miniature, to try this script; their figures say nothing (cuda)
# OUT       folder of results (bench/results/gpu-H200-16cpu, by the machine's names; of cpu: data/gpu-cpu/results)
# DATA      folder of pictures and logs (data/gpu; of cpu: data/gpu-cpu)
# MINUTES   what is not done after so many is left to the next run (25)
set -uo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
minutes=${MINUTES:-25}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if [ "$device" = cpu ]; then
    results=$root/data/gpu-cpu/results pictures=$root/data/gpu-cpu
    export CUDA_VISIBLE_DEVICES=
elif machine=$("$python" -c 'import torch; print(torch.cuda.get_device_name())' 2>/dev/null); then
    machine=$(echo "${machine#NVIDIA }" | tr -cs '[:alnum:]\n' -)
    results=$root/bench/results/gpu-$machine-$(nproc)cpu pictures=$root/data/gpu
else
    echo "torch finds no GPU here; 'DEVICE=cpu bash bench/gpu.sh' tries the steps in miniature on the CPU" >&2
    exit 2
fi
out=$(realpath -m "${OUT:-$results}")
data=$(realpath -m "${DATA:-$pictures}")
mkdir -p "$out/unfinished" "$data" || exit 2
asked=("$@")
without_result=()
running=

stop() {  # EXIT-CODE: ends the step that runs, and this script
    [ -z "$running" ] || { kill "$running" && wait "$running"; } 2>/dev/null
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

run() {  # SECONDS COMMAND...: ends it after so many, and with this script, however that ends
    setpriv --pdeathsig TERM timeout --kill-after=20 "$@" </dev/null &
    running=$!
    wait "$running"
    local code=$?
    running=
    return "$code"
}

has_time() {  # NAME SECONDS: a third of the limit is the plan for an H200 with 16 CPUs
    [ $((minutes * 60 - SECONDS)) -ge $(($2 / 3)) ] && return
    echo "$1: no time left for it; run the same line again"
    without_result+=("$1")
    return 1
}

is_asked() {
    [ ${#asked[@]} = 0 ] || [[ " ${asked[*]} " == *" $1 "* ]]
}

step() {  # NAME SECONDS ARGUMENTS-OF-BENCH...
    local name=$1 limit=$2 left=$((minutes * 60 - SECONDS)) code
    shift 2
    is_asked "$name" || return
    if [ -e "$out/$name.json" ]; then
        echo "$name: is measured, $out/$name.json"
        return
    elif ! has_time "$name" "$limit"; then
        return
    fi
    limit=$((limit < left ? limit : left))
    echo "$name: begins, at most $limit s"
    run "$limit" "$python" -m bench "$@" --json "$out/unfinished/$name.json" 2>"$data/$name.log"
    code=$?
    if [ "$code" = 0 ] && mv "$out/unfinished/$name.json" "$out/"; then
        echo "$name: is measured, $out/$name.json"
    elif [ "$code" = 124 ] || [ "$code" = 137 ]; then
        echo "$name: stopped after $limit s; the next run goes on from there"
        without_result+=("$name")
    else
        echo "$name: failed: $(tail -n 1 "$data/$name.log"); see $data/$name.log"
        without_result+=("$name")
    fi
}

tests() {  # those that are marked gpu; they are run again until they pass
    is_asked tests || return
    if [ -e "$out/tests.txt" ]; then
        echo "tests: have passed, $out/tests.txt"
    elif ! has_time tests 450; then
        return
    elif run 450 "$python" -m pytest "$@" -c "$root/pyproject.toml" -m gpu -q -p no:cacheprovider >"$out/unfinished/tests.txt" 2>&1; then
        mv "$out/unfinished/tests.txt" "$out/"
        echo "tests: have passed, $out/tests.txt"
    else
        echo "tests: failed: $(tail -n 1 "$out/unfinished/tests.txt"); see $out/unfinished/tests.txt"
        without_result+=(tests)
    fi
}

resnet50=resnet50 vit=vit_s_16 compile=(--compile)
images=5120 side=448  # 20 batches; twice the side that is served
timing=(--size 224 --batch-size 256 --batches 40 --warmup 20 --repeats 2 --device cuda)
hardware=(--seconds 0.5 --repeats 3)
workers=1,2,4,8,16
marked=$root/tests
if [ "$device" = cpu ]; then
    resnet50=emulated:2000 vit=emulated:4000 compile=()
    images=64 side=64
    timing=(--size 32 --batch-size 8 --batches 3 --warmup 1 --repeats 1 --device cpu)
    hardware=(--seconds 0.01 --repeats 1)
    workers=1,2
    marked=$root/tests/loaders/test_transfer.py
fi

photos=$data/photos shards=$data/shards webdataset=$data/webdataset squares=$data/squares
convert=("$python" -m precache convert "$photos")
{
    { [ -e "$photos" ] || run 300 "$python" -m precache sample "$photos" --images "$images" --classes 64; } &&
        run 300 "${convert[@]}" "$shards" --format shards --size "$side" &&
        run 300 "${convert[@]}" "$webdataset" --format webdataset --size "$side" &&
        # the device keeps pictures of one size
        run 300 "${convert[@]}" "$squares" --format shards --fit crop --size "$side"
} || { echo "there are no pictures to measure with" >&2; exit 2; }

loaders=(loaders --trainer "$resnet50" "${timing[@]}")
loaders_vit=(loaders --trainer "$vit" "${timing[@]}")
# The most important ones first. Does ResNet-50 wait for decoded shards, for photographs that are decoded as it goes,
# for JPEGs as `precache convert` stores them?
step resnet50 240 "${loaders[@]}" "$shards" --backend shards,synthetic
step resnet50-device 180 "${loaders[@]}" "$squares" --backend shards --cache device
step photos 300 "${loaders[@]}" "$photos" --backend dali,nvjpeg,pytorch
step stored 300 "${loaders[@]}" "$webdataset" --backend dali,nvjpeg,webdataset
# Does it, compiled?
step compiled 360 "${loaders[@]}" "$shards" --backend shards,synthetic "${compile[@]}"
step compiled-device 240 "${loaders[@]}" "$squares" --backend shards --cache device "${compile[@]}"
step compiled-photos 300 "${loaders[@]}" "$photos" --backend dali,nvjpeg "${compile[@]}"
# Does ViT-S/16?
step vit 240 "${loaders_vit[@]}" "$shards" --backend shards,synthetic
step vit-device 180 "${loaders_vit[@]}" "$squares" --backend shards --cache device
step vit-photos 300 "${loaders_vit[@]}" "$photos" --backend dali,nvjpeg,pytorch
# What do memory, disk, bus and GPU give? How many threads or processes must decode?
step hardware 150 hardware --data "$photos" --scratch "$data" "${hardware[@]}"
step workers 300 "${loaders[@]}" "$photos" "$shards" --workers "$workers" --repeats 1
step resnet50-ram 180 "${loaders[@]}" "$shards" --backend shards --cache ram
tests "$marked"

measured=("$out"/*.json)
[ ! -e "${measured[0]}" ] || "$python" -m bench report "${measured[@]}" --html "$out/page.html" || exit 2
if [ ${#without_result[@]} -gt 0 ]; then
    echo "without a result: ${without_result[*]}"
    exit 1
fi
echo "every step has its result; see $out/page.html"
