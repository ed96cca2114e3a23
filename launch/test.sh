#!/usr/bin/env bash
# Every test that needs no GPU: launch/test.sh [lint|unit|torchrun|mpirun|faults|engine ...]   (default: all)
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"
cd "$ROOT"

lint() {
  "$PY" -m ruff check . && "$PY" -m ruff format --check . && "$PY" -m pyright --pythonpath "$PY" \
    && "$(dirname "$PY")/lint-imports" --no-cache
}
unit() { timeout --kill-after=10 600 "$PY" -m pytest tests/unit -q; }
torchrun() { launch/torchrun_tests.sh; }
mpirun() { launch/mpirun_tests.sh; }
faults() { timeout --kill-after=10 1200 "$PY" -m pytest tests/multirank -q --ignore tests/multirank/spmd; }

failed=()
for part in ${*:-lint unit torchrun mpirun faults}; do
  case $part in
    lint | unit | torchrun | mpirun | faults) ;;
    *) echo "part '$part': allowed is lint, unit, torchrun, mpirun, faults" >&2; exit 2 ;;
  esac
  echo "=== $part"
  start=$SECONDS
  "$part" || failed+=("$part")
  echo "=== $part: $((SECONDS - start)) s"
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all parts passed in $SECONDS s"
