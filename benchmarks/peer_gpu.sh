#!/usr/bin/env bash
# The peer transport on the GPUs of one host: checks, then timings. Usage: peer_gpu.sh OUT_FOLDER [WORLD] [PART...]
# Parts: links short bits graphs streams withheld soak shared sanitize tune calibrate bench eager.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=$1; world=${2:-$(python3 -c 'import torch; print(torch.cuda.device_count())')}; shift $(( $# < 2 ? $# : 2 ))
parts=${*:-links bits graphs streams withheld soak shared sanitize calibrate bench}
export DSV41_PEER_MAX_MIB=64 PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
# Peer addresses are all this needs: NVLink multicast stays off in everything that is compared.
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
run() { python3 -m torch.distributed.run --standalone --nproc-per-node "$@"; }
failed=
for part in $parts; do
  echo "== $part, world $world"; begin=$SECONDS
  case $part in
    links) python3 benchmarks/peer_links.py ;;
    shared) timeout 100 bash -c "$(declare -f run); run $((world + 1)) -m tests.gpu.peer_rank shared; run 8 -m tests.gpu.peer_rank shared" ;;
    sanitize)
      found=0
      for tool in ${TOOLS:-memcheck racecheck}; do
        timeout ${SANITIZE_S:-120} compute-sanitizer --tool $tool --report-api-errors no --target-processes all --error-exitcode 9 \
          python3 -m torch.distributed.run --standalone --nproc-per-node "$world" -m tests.gpu.peer_rank short \
          2>&1 | grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Invalid|byte-equal|Error' | sort | uniq -c | head -20
        code=${PIPESTATUS[0]} # the tool's, not that of what shortens its report
        [ "$code" = 0 ] || found=$code
      done
      (exit "$found") ;;
    tune) timeout 260 bash -c "$(declare -f run); run $world benchmarks/peer_tune.py $out/peer_tune_$world.json ${TUNE_S:-150}" ;;
    calibrate) timeout 100 bash -c "$(declare -f run); run $world benchmarks/peer_calibrate.py $out/peer_table_$world.json" ;;
    bench) timeout 200 bash -c "$(declare -f run); run $world benchmarks/peer_bench.py $out/peer_graph_$world.json" ;;
    eager) timeout 200 bash -c "$(declare -f run); run $world benchmarks/peer_bench.py $out/peer_eager_$world.json eager" ;;
    *) timeout 120 bash -c "$(declare -f run); run $world -m tests.gpu.peer_rank $part" ;;
  esac
  status=$?
  [ $status = 0 ] || failed="$failed $part($status)"
  echo "== $part ended with $status after $((SECONDS - begin)) s"
done
[ -z "$failed" ] || { echo "FAILED:$failed"; exit 1; }
echo "all parts passed: $parts"
