#!/usr/bin/env bash
# The published SGLang serving a tiny DeepSeek-V4.1 at TP4 on four CPU processes of this machine, stock and with adapters,
# and whether their tokens and logits are the same. Ends READY (0) or NOT READY (1).
#
#   launch/rehearse.sh                     preflight, then every adapter of this version
#   launch/rehearse.sh --gates "DSV41_X=1" [any option of `python -m dsv41_dist rehearse`]
#
# The first time it makes two environments (.venv; and the engine's, about 3 GB under ~/.cache/dsv41_dist), unless
# DSV41_PYTHON and DSV41_ENGINE_PYTHON name interpreters to use as they are.
set -euo pipefail
start=$SECONDS
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"
cd "$ROOT"

if [ -z "${DSV41_ENGINE_PYTHON:-}" ]; then
  echo "[1/3] the engine's environment (once; a few minutes) ..." >&2
  DSV41_ENGINE_PYTHON=$(DSV41_PYTHON="$PY" launch/engine_env.sh | tail -n 1)
  export DSV41_ENGINE_PYTHON
fi
if [ $# -gt 0 ]; then
  exec "$PY" -m dsv41_dist rehearse "$@"
fi
installed=$((SECONDS - start))
echo "[2/3] preflight: four ranks of the communication layer ..." >&2
timeout --kill-after=10 300 "$PY" -m dsv41_dist preflight --ranks 4
echo "[3/3] the engine, stock and adapted ..." >&2
code=0
"$PY" -m dsv41_dist rehearse --gates all --must-fire || code=$?
echo "launch/rehearse.sh: $((SECONDS - start - installed)) s after the installs (${installed} s)" >&2
exit "$code"
