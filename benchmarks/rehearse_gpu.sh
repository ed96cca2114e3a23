#!/usr/bin/env bash
# The rehearsal on the GPUs of one host: benchmarks/rehearse_gpu.sh OUT_FOLDER [ENGINE_FOLDER]
# Stock at TP1, eager and with CUDA graphs; stock and adapted at TP2, eager with the bit-identical adapters and with CUDA
# graphs and every adapter. All at once, as they share nothing: about four minutes, most of it compiling and importing.
# ENGINE_FOLDER: what launch/pack_engine.sh's unpack.sh unpacked; without it the installed engine.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
out=$1 engine=${2:+--engine-folder $2}
mkdir -p "$out"
python=${DSV41_PYTHON:-python3}
export DSV41_ENGINE_PYTHON=${DSV41_ENGINE_PYTHON:-$python} OMP_NUM_THREADS=1 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
exact="DSV41_FOLDED_FENCE=1 DSV41_REPLICATED_SPLIT=wqkv_a,engram.wkv DSV41_ROCE_GATHER=4096 DSV41_INDEXER_CHUNKED=1 \
DSV41_INDEXER_BUDGET_MB=16 SPARK_PREFILL_TP_SPLIT=1 DSV41_PREFILL_SP=1 DSV41_PREFILL_SP_EXACT=1 DSV41_PREFILL_SP_MIN_ROWS=128"
rehearse() { # NAME OPTIONS...
  local name=$1 start=$SECONDS code=0
  shift
  # shellcheck disable=SC2086 # $engine is two words or none
  timeout --kill-after=10 500 "$python" -m dsv41_dist rehearse --device cuda $engine --timeout 240 --json "$@" \
    >"$out/rehearsal_$name.json" 2>"$out/rehearsal_$name.log" || code=$?
  echo "$name: exit $code, $((SECONDS - start)) s"
  return "$code"
}
declare -A jobs
CUDA_VISIBLE_DEVICES=0 rehearse tp1 --tp 1 --no-draft & jobs[tp1]=$!
CUDA_VISIBLE_DEVICES=1 rehearse tp1_graphs --tp 1 --no-draft --graphs & jobs[tp1_graphs]=$!
rehearse tp2 --tp 2 --gates "$exact" & jobs[tp2]=$!
rehearse tp2_graphs --tp 2 --graphs --gates all & jobs[tp2_graphs]=$!
failed=
for name in "${!jobs[@]}"; do wait "${jobs[$name]}" || failed="$failed $name"; done
[ -z "$failed" ] || { echo "NOT READY:$failed"; exit 1; }
echo "rehearse_gpu: all READY in $SECONDS s"
