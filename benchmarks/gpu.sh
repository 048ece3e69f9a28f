#!/bin/sh
# What is measured on a GPU, in one go: benchmarks/gpu.sh FOLDER [DEVICE]
#
# Seven minutes on an H100: the same scores as simple_evaluate and the search's speed, what each method costs a model of
# Vicuna-7B's shape, and what chunks of a search cost it. With cpu as DEVICE the same programs run at a small size.
set -eu
cd "$(dirname "$0")/.."
out=$1 device=${2:-cuda}
mkdir -p "$out"
if [ "$device" = cpu ]; then
    speed="--individuals 2 --examples 6 --metadata {\"num_keys\":10}"
    efficiency="--preset small --shapes tiny --lengths 64"
    chunks="--shapes tiny --records 10 --questions 1 4 --new_tokens 4"
else
    nvidia-smi >"$out/nvidia-smi.txt"
    speed="--individuals 4 --examples 48 --switched_off 1"
    efficiency="--preset gpu --shapes vicuna-7b --lengths 1500 4096 --batches 1 --rounds 5 --new_tokens 24 --budget 240"
    chunks="--shapes vicuna-7b --dtype float16 --budget 80"
fi
python benchmarks/search_speed.py --device "$device" $speed --run "$device" --out "$out/search_speed.jsonl" || echo "failed: search_speed"
python benchmarks/efficiency.py --device "$device" $efficiency --output "$out/efficiency-$device.json" || echo "failed: efficiency"
python -m benchmarks.chunk_costs --device "$device" $chunks --output "$out/chunk_costs.jsonl" || echo "failed: chunk_costs"
