#!/usr/bin/env bash
# The TP4 record: everything that several GPUs of one host can show, in one call of at most 10 minutes.
# Usage: tp4_gpu.sh OUT_FOLDER [WORLD]. WORLD is 4, or all GPUs of a machine with fewer; it says which it ran.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=$1; mkdir -p "$out"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
world=${2:-$(( gpus < 4 ? gpus : 4 ))}
echo "tp4_gpu: world $world on $gpus GPUs"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
run() { timeout 120 python3 -m torch.distributed.run --standalone --nproc-per-node "$world" "$@"; }
failed=
run -m dsv41_dist preflight || failed="$failed preflight"
TUNE_S=${TUNE_S:-60} benchmarks/peer_gpu.sh "$out" "$world" bits graphs streams withheld soak tune calibrate bench || failed="$failed peer"
layers=0
for script in benchmarks/layer_*.py; do
  [ -e "$script" ] || continue
  layers=$((layers + 1))
  run "$script" "$out/$(basename "$script" .py)_$world.json" || failed="$failed $script"
done
echo "layer benchmarks run: $layers"
timeout 120 python3 -m dsv41_dist bench verify --json "$out/verify.json" || failed="$failed verify"
[ -z "$failed" ] || { echo "FAILED at world $world:$failed"; exit 1; }
echo "tp4_gpu: everything passed at world $world"
