#!/usr/bin/env bash
# The multi-rank tests under torchrun (gloo): launch/torchrun_tests.sh [SIZE ...]   (default 1 2 3 4 5)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"
cd "$ROOT"
export DSV41_COMM_TIMEOUT_S=${DSV41_COMM_TIMEOUT_S:-30}
for size in ${*:-1 2 3 4 5}; do
  echo "== torchrun, $size ranks"
  timeout --kill-after=10 300 "$PY" -m torch.distributed.run --standalone --max-restarts 0 --nproc-per-node "$size" \
    -m tests.multirank
done
