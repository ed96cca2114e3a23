#!/usr/bin/env bash
# The TP4 record: everything that several GPUs of one host can show, in one call of at most 10 minutes.
# Usage: tp4_gpu.sh OUT_FOLDER [WORLD]. WORLD is 4, or all GPUs of a machine with fewer; it says which it ran.
# PARTS="..." chooses among the parts below. (Over RoCE's own kernels: tests/gpu/run_engine_gpu.sh, which needs b12x.)
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=$1; mkdir -p "$out"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
world=${2:-$(( gpus < 4 ? gpus : 4 ))}
echo "tp4_gpu: world $world on $gpus GPUs"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0
export DSV41_PYTHON=${DSV41_PYTHON:-python3}
ops="all_reduce all_gather all_gather_columns reduce_scatter broadcast"
run() { timeout 150 python3 -m torch.distributed.run --standalone --nproc-per-node "$world" "$@"; }
nccl() {
  timeout 150 python3 -m dsv41_dist bench $ops -b 1K -e 64M -f 4 --hidden 5120 -n 20 -w 5 -G 10 --ranks "$world" \
    --device cuda --transport process_group --json "$out/nccl-graph-x$world.json" --plot "$out/nccl-graph-x$world.png"
}
layers() {
  local script status=0
  for script in benchmarks/layer_*.py; do
    run "$script" "$out/$(basename "$script" .py)_$world.json" || status=1
  done
  return $status
}
failed=
for part in ${PARTS:-preflight torchrun mpirun checks nccl bench layers verify}; do
  begin=$SECONDS
  echo "== $part"
  case $part in
    preflight) run -m dsv41_dist preflight --device cuda ;;
    torchrun) launch/torchrun_tests.sh "$world" ;; # gloo: the same tests as without a GPU
    mpirun) launch/mpirun_tests.sh "$world" ;;
    checks) benchmarks/peer_gpu.sh "$out" "$world" bits graphs streams withheld soak ;;
    nccl) nccl ;;
    bench) benchmarks/peer_gpu.sh "$out" "$world" calibrate bench ;;
    layers) layers ;;
    verify) timeout 120 python3 -m dsv41_dist bench verify --json "$out/verify.json" --plot "$out/verify.png" ;;
    *) echo "part '$part': not one of those above"; false ;;
  esac || failed="$failed $part"
  echo "== $part: $((SECONDS - begin)) s"
done
[ -z "$failed" ] || { echo "FAILED at world $world:$failed"; exit 1; }
echo "tp4_gpu: everything passed at world $world in $SECONDS s"
