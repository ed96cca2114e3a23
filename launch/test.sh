#!/usr/bin/env bash
# Every test that needs no GPU:
#   launch/test.sh [--full] [lint|unit|torchrun|mpirun|faults|rehearsal|engine ...]   (default: all parts)
# `rehearsal` boots the real engine twice, stock and adapted. --full adds to it the boots for everything else, and to
# `engine` the tests of every adapter on the real classes of three releases: two hours on two cores.
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
rehearsal() {
  local python most=(--ignore tests/rehearsal/test_boots.py --ignore tests/rehearsal/test_faults.py)
  [ -n "$full" ] && most=()
  python=$(timeout --kill-after=10 900 launch/engine_env.sh) || return
  DSV41_ENGINE_PYTHON=$python DSV41_REQUIRE_ENGINE=1 timeout --kill-after=10 7200 \
    "$PY" -m pytest tests/rehearsal -q "${most[@]}"
}
engine() {
  local python tests=(tests/engine/test_{doctor,fence,plugin_door,four_ranks,speculative_facts}.py)
  [ -n "$full" ] && tests=(tests/engine)
  python=$(timeout --kill-after=10 900 launch/engine_env.sh) || return
  DSV41_ENGINE_PYTHON=$python DSV41_REQUIRE_ENGINE=1 timeout --kill-after=10 3000 "$PY" -m pytest "${tests[@]}" -q
}
faults() { timeout --kill-after=10 1200 "$PY" -m pytest tests/multirank -q --ignore tests/multirank/spmd; }

full=
if [ "${1:-}" = --full ]; then
  full=1
  shift
fi
failed=()
for part in ${*:-lint unit torchrun mpirun faults rehearsal engine}; do
  case $part in
    lint | unit | torchrun | mpirun | faults | rehearsal | engine) ;;
    *) echo "part '$part': allowed is lint, unit, torchrun, mpirun, faults, rehearsal, engine" >&2; exit 2 ;;
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
