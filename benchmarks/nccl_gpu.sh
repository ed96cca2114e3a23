#!/usr/bin/env bash
# Preflight and bench over NCCL on the GPUs of one host: DSV41_PYTHON=python3 benchmarks/nccl_gpu.sh RANKS OUTDIR
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/_python.sh"
cd "$ROOT"
ranks=${1:?ranks} out=${2:?folder for the results}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
mkdir -p "$out"
bench() { "$PY" -m dsv41_dist bench "$@" --ranks "$ranks" --device cuda --transport process_group; }
ops="all_reduce all_gather all_gather_columns reduce_scatter broadcast"
"$PY" -m dsv41_dist preflight --ranks "$ranks" --device cuda
"$PY" -m dsv41_dist preflight --ranks "$ranks" --device cuda --json >"$out/preflight-nccl-x$ranks.json"
"$PY" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m dsv41_dist preflight --device cuda
bench $ops -b 1K -e 64M -f 4 --hidden 5120 -n 50 -w 10 -G 20 --json "$out/nccl-graph-x$ranks.json" --plot "$out/nccl-graph-x$ranks.png"
bench $ops agree seqpar --tokens 4096 --hidden 5120 -n 20 --json "$out/nccl-eager-x$ranks.json"
bench all_gather_columns --tokens 6,96 --hidden 1792 --json "$out/nccl-columns-x$ranks.json"
if bench all_gather_columns --tokens 6 --hidden 1792 --flip-byte 1; then echo "a flipped byte was not seen" >&2; exit 1; fi
echo "NCCL over $ranks GPUs: done"
