#!/usr/bin/env bash
# The GPU tests that need the published engine, in one call: tests/gpu/run_engine_gpu.sh OUT WORLD ENGINE [B12X]
#
# ENGINE: what launch/pack_engine.sh's unpack.sh unpacked. B12X: a folder with b12x 1.5 and nvidia-cutlass-dsl 4.8 in it; a
# folder `include` in it with infiniband/verbs.h serves where the system has none. Without it the RoCE part is not run.
set -uo pipefail
out=$1 world=$2 engine=$3 b12x=${4:-}
python=${DSV41_PYTHON:-python3}
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$root"
mkdir -p "$out"
export PYTHONPATH="$root/dsv41_dist/sitecustomize:$root:$engine${b12x:+:$b12x:$b12x/nvidia_cutlass_dsl/dsl_packages}"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONWARNINGS=ignore
failed=()

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  if timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "$name: ok, $((SECONDS - start)) s"
  else
    echo "$name: FAILED ($?), $((SECONDS - start)) s"
    failed+=("$name")
    tail -n 30 "$out/$name.log"
  fi
}

for name in ${PARTS:-split roce roce_engine roce_lost}; do
  case $name in
    split) DSV41_REPLICATED_SPLIT=wqkv_a DSV41_SPLIT_COMPACT_GATHER=1 DSV41_DRAFT_MAIN_PROJ_SPLIT=1 \
      part split 200 "$python" -m torch.distributed.run --standalone --nproc-per-node "$world" \
      -m tests.gpu.split_rank "$out/split_engine_$world.json" ;;
    roce) part roce 240 "$python" -m tests.gpu.roce_fabric "$out" "$world" bits,graphs,times ;;
    roce_engine) DSV41_ROCE_GATHER=2097152 DSV41_ONESHOT=roce \
      part roce_engine 200 "$python" -m tests.gpu.roce_fabric "$out" "$world" engine ;;
    roce_lost) part roce_lost 120 "$python" -m tests.gpu.roce_fabric "$out" "$world" lost B12X_ROCE_SPIN_LIMIT=2000000 ;;
    *) echo "$name: no such part"; failed+=("$name") ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
