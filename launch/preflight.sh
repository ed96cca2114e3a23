#!/usr/bin/env bash
# Four ranks on this machine agree, gather, split and reduce, with every byte checked. Ends READY (0) or NOT READY (1).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"
cd "$ROOT"
if [ $# -eq 0 ]; then set -- --ranks 4; fi
exec "$PY" -m dsv41_dist preflight "$@"
