#!/bin/sh
# What is measured on a GPU, in one go: benchmarks/gpu.sh FOLDER [DEVICE]
#
# What each method costs a model of Vicuna-7B's shape, and LPES when decoding is compiled. With cpu as DEVICE the same
# programs run at a small size.
set -eu
status=0
failed() {
    echo "failed: $1"
    status=1
}
cd "$(dirname "$0")/.."
out=$1 device=${2:-cuda}
mkdir -p "$out"
if [ "$device" = cpu ]; then
    efficiency="--preset small --shapes tiny --lengths 64"
    compiled="$efficiency --methods lpes"
else
    nvidia-smi >"$out/nvidia-smi.txt"
    efficiency="--preset gpu --shapes vicuna-7b --lengths 1500 4096 --batches 1 --rounds 5 --new_tokens 24 --budget 180"
    compiled="--preset gpu --shapes vicuna-7b --lengths 1500 --batches 1 --rounds 4 --methods lpes pi --budget 110"
fi
python benchmarks/efficiency.py --device "$device" $efficiency --output "$out/efficiency-$device.json" || failed efficiency
python benchmarks/efficiency.py --device "$device" $compiled --compiled --output "$out/efficiency-compiled.json" || failed compiled
exit $status
