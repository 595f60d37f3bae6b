#!/usr/bin/env bash
# Measure whether the GPU of this machine waits for data, with every loader. Linux; needs no network.
#
#     bash bench/gpu.sh                       all steps
#     bash bench/gpu.sh resnet50 hardware     these steps
#
# A step is a command with a time limit. Its result is OUT/STEP.json; a step with a result is not run again. A step that
# was stopped has its trials in OUT/unfinished: run the same line again, and it goes on from them. To measure a step
# anew, remove its file. OUT/page.html shows all results. The exit code is 1 where a step has no result.
#
# Variables, and their defaults:
# PYTHON    Python that has torch and the packages that pyproject.toml names (python3)
# DEVICE    cuda, or cpu: the same steps in miniature, to try this script; their figures say nothing (cuda)
# OUT       folder of results (bench/results/gpu-H200-16cpu, by the machine's names; with cpu, data/gpu-cpu/results)
# DATA      folder of pictures and logs (data/gpu; with cpu, data/gpu-cpu)
# MINUTES   minutes after which no step begins; the next run does the others (25)
set -uo pipefail
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
minutes=${MINUTES:-25}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if [ "$device" = cpu ]; then
    results=$root/data/gpu-cpu/results pictures=$root/data/gpu-cpu
    export CUDA_VISIBLE_DEVICES=
else
    name='import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")'
    machine=$("$python" -c "$name") || exit 2
    if [ -z "$machine" ]; then
        echo "torch finds no GPU here; 'DEVICE=cpu bash bench/gpu.sh' tries the steps in miniature on the CPU" >&2
        exit 2
    fi
    machine=$(echo "${machine#NVIDIA }" | tr -cs '[:alnum:]\n' -)
    results=$root/bench/results/gpu-$machine-$(nproc)cpu pictures=$root/data/gpu
fi
out=$(realpath -m "${OUT:-$results}")
data=$(realpath -m "${DATA:-$pictures}")
mkdir -p "$out/unfinished" "$data" || exit 2
chosen_steps=("$@")
all_steps=()
without_result=()
running_pid=

stop() {  # EXIT-CODE: ends the running step and this script
    [ -z "$running_pid" ] || { kill "$running_pid" && wait "$running_pid"; } 2>/dev/null
    exit "$1"
}
trap 'stop 130' INT
trap 'stop 143' TERM

run() {  # SECONDS COMMAND...: runs the command, and ends it after so many seconds or when this script has ended
    setpriv --pdeathsig TERM timeout --kill-after=20 "$@" </dev/null &
    running_pid=$!
    wait "$running_pid"
    local code=$?
    running_pid=
    return "$code"
}

begin() {  # NAME SECONDS: whether the step is to run now; sets `limit`, the seconds that it may take
    all_steps+=("$1")
    if [ ${#chosen_steps[@]} -gt 0 ] && [[ " ${chosen_steps[*]} " != *" $1 "* ]]; then
        return 1
    elif [ -e "$out/$1.json" ] || [ -e "$out/$1.txt" ]; then
        echo "$1: has its result"
        return 1
    fi
    local left=$((minutes * 60 - SECONDS))
    if [ "$left" -lt $(($2 / 3)) ]; then  # an H200 with 16 CPUs takes a third of the limit
        echo "$1: no time left for it; run the same line again"
        without_result+=("$1")
        return 1
    fi
    limit=$(($2 < left ? $2 : left))
    echo "$1: begins, at most $limit s"
}

end() {  # NAME EXIT-CODE RESULT LOG: keeps the result, or prints why there is none
    if [ "$2" = 0 ] && mv "$out/unfinished/$3" "$out/"; then
        echo "$1: done, $out/$3"
        return
    elif [ "$2" = 124 ] || [ "$2" = 137 ]; then
        echo "$1: stopped after $limit s; the next run goes on from there"
    else
        echo "$1: failed: $(tail -n 1 "$4"); see $4"
    fi
    without_result+=("$1")
}

step() {  # NAME SECONDS ARGUMENTS-OF-BENCH...
    begin "$1" "$2" || return
    local name=$1 log=$data/$1.log
    shift 2
    run "$limit" "$python" -m bench "$@" --json "$out/unfinished/$name.json" 2>"$log"
    end "$name" $? "$name.json" "$log"
}

tests() {  # FOLDER: runs the tests that are marked gpu; if one fails, there is no result
    begin tests 450 || return
    local log=$out/unfinished/tests.txt
    run "$limit" "$python" -m pytest "$1" -c "$root/pyproject.toml" -m gpu -q -p no:cacheprovider >"$log" 2>&1
    end tests $? tests.txt "$log"
}

make_pictures() {
    local convert=("$python" -m precache convert "$photos")
    if ! [ -e "$photos" ]; then
        run 300 "$python" -m precache sample "$photos" --images "$images" --classes 64 || return
    fi
    run 300 "${convert[@]}" "$shards" --format shards --size "$side" &&
        run 300 "${convert[@]}" "$webdataset" --format webdataset --size "$side" &&
        run 300 "${convert[@]}" "$squares" --format shards --fit crop --size "$side"
}

resnet50=resnet50 vit=vit_s_16 compile=(--compile)
images=5120 side=448  # 20 batches; pictures are stored at twice the side that is served
timing=(--size 224 --batch-size 256 --batches 40 --warmup 20 --repeats 2 --device cuda)
hardware=(--seconds 0.5 --repeats 3)
workers=1,2,4,8,16
on_gpu=(--cache device)
marked=$root/tests
if [ "$device" = cpu ]; then
    resnet50=emulated:2000 vit=emulated:4000 compile=()
    images=64 side=64
    timing=(--size 32 --batch-size 8 --batches 3 --warmup 1 --repeats 1 --device cpu)
    hardware=(--seconds 0.01 --repeats 1)
    workers=1,2
    on_gpu=()  # a CPU has no memory of its own to keep pictures in
    marked=$root/tests/loaders/test_backends.py
fi

photos=$data/photos shards=$data/shards webdataset=$data/webdataset
squares=$data/squares  # for --cache device, which keeps only pictures of one size
make_pictures || { echo "there are no pictures to measure with" >&2; exit 2; }

loaders=(loaders --trainer "$resnet50" "${timing[@]}")
loaders_vit=(loaders --trainer "$vit" "${timing[@]}")
# The most important steps first: does ResNet-50 wait for shards of pixels, for photographs that are decoded in
# training, for JPEGs that `precache convert` has stored?
step resnet50 240 "${loaders[@]}" "$shards" --backend shards,synthetic
step resnet50-device 180 "${loaders[@]}" "$squares" --backend shards "${on_gpu[@]}"
step photos 300 "${loaders[@]}" "$photos" --backend dali,pytorch,imagefolder
step stored 300 "${loaders[@]}" "$webdataset" --backend dali,webdataset
# Does ResNet-50 wait when it is compiled?
step compiled 360 "${loaders[@]}" "$shards" --backend shards,synthetic "${compile[@]}"
step compiled-device 240 "${loaders[@]}" "$squares" --backend shards "${on_gpu[@]}" "${compile[@]}"
step compiled-photos 300 "${loaders[@]}" "$photos" --backend dali "${compile[@]}"
# Does ViT-S/16 wait?
step vit 240 "${loaders_vit[@]}" "$shards" --backend shards,synthetic
step vit-device 180 "${loaders_vit[@]}" "$squares" --backend shards "${on_gpu[@]}"
step vit-photos 300 "${loaders_vit[@]}" "$photos" --backend dali,pytorch
# How fast are memory, disk, bus and GPU? How many threads or processes must decode?
step hardware 150 hardware --data "$photos" --scratch "$data" "${hardware[@]}"
step workers 300 "${loaders[@]}" "$photos" "$shards" --backend pytorch,shards --workers "$workers" --repeats 1
tests "$marked"

for name in "${chosen_steps[@]}"; do
    if [[ " ${all_steps[*]} " != *" $name "* ]]; then
        echo "unknown step '$name'; choose from: ${all_steps[*]}" >&2
        exit 2
    fi
done
"$python" -m bench.gpu_page "$out" "${without_result[@]}" || exit 2
if [ ${#without_result[@]} -gt 0 ]; then
    echo "without a result: ${without_result[*]}; the others are in $out/page.html"
    exit 1
fi
echo "all that was asked for is measured; see $out/page.html"
