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
engine() {
  local python
  python=$(timeout --kill-after=10 900 launch/engine_env.sh) || return
  DSV41_ENGINE_PYTHON=$python DSV41_REQUIRE_ENGINE=1 timeout --kill-after=10 1500 "$PY" -m pytest tests/engine -q
}
faults() { timeout --kill-after=10 1200 "$PY" -m pytest tests/multirank -q --ignore tests/multirank/spmd; }

failed=()
for part in ${*:-lint unit torchrun mpirun faults engine}; do
  case $part in
    lint | unit | torchrun | mpirun | faults | engine) ;;
    *) echo "part '$part': allowed is lint, unit, torchrun, mpirun, faults, engine" >&2; exit 2 ;;
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
