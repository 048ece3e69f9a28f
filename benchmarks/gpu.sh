#!/bin/sh
# What is measured on a GPU, in one go: benchmarks/gpu.sh FOLDER [DEVICE]
#
# Some nine minutes on an H100: the same scores as simple_evaluate and the search's speed, also with a model of 50 million
# parameters; what each method costs a model of Vicuna-7B's shape, what chunks of a search cost it, and LPES when decoding
# is compiled. With cpu as DEVICE the same programs run at a small size.
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
    speed="--individuals 2 --examples 6 --metadata {\"num_keys\":10}"
    efficiency="--preset small --shapes tiny --lengths 64"
    chunks="--shapes tiny --records 10 --questions 1 4 --new_tokens 4" larger="--width 160 --feed_forward 320"
    compiled="$efficiency --methods lpes"
else
    nvidia-smi >"$out/nvidia-smi.txt"
    speed="--individuals 8 --examples 48 --switched_off 3 --batch_size 144" larger="--width 768 --feed_forward 2560"
    efficiency="--preset gpu --shapes vicuna-7b --lengths 1500 4096 --batches 1 --rounds 5 --new_tokens 24 --budget 180"
    compiled="--preset gpu --shapes vicuna-7b --lengths 1500 --batches 1 --rounds 4 --methods lpes pi --budget 110"
    chunks="--shapes vicuna-7b --dtype float16 --budget 80"
fi
python -m benchmarks.reference.pad --out "$out/larger" $larger || failed pad
for model in reference "$out/larger"; do
    python benchmarks/search_speed.py --device "$device" --pretrained "$model" $speed --run "$(basename "$model")" \
        --out "$out/search_speed.jsonl" || failed search_speed
done
rm -rf "$out/larger"
python benchmarks/efficiency.py --device "$device" $efficiency --output "$out/efficiency-$device.json" || failed efficiency
python -m benchmarks.chunk_costs --device "$device" $chunks --output "$out/chunk_costs.jsonl" || failed chunk_costs
python benchmarks/efficiency.py --device "$device" $compiled --compiled --output "$out/efficiency-compiled.json" || failed compiled
exit $status
