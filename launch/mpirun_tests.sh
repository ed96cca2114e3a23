#!/usr/bin/env bash
# The multi-rank tests under mpirun, over MPI and over gloo, each the other's oracle: launch/mpirun_tests.sh [SIZE ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"
cd "$ROOT"
# Open MPI refuses root and more ranks than cores unless told; ranks that wait must yield the cores they share.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
export DSV41_COMM_TIMEOUT_S=${DSV41_COMM_TIMEOUT_S:-30}
MPIRUN="$(dirname "$PY")/mpirun"
[ -x "$MPIRUN" ] || MPIRUN=$(command -v mpirun) || { echo "mpirun: not found; install Open MPI" >&2; exit 2; }
for size in ${*:-4}; do
  echo "== mpirun, $size ranks"
  timeout --kill-after=10 300 "$MPIRUN" --oversubscribe -np "$size" "$PY" -m tests.multirank
done
