# Sourced by the launch scripts: sets PY to an interpreter that has what they need, and ROOT to the checkout.
# DSV41_PYTHON names one to use as it is; otherwise .venv is made from the locked requirements (once).
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

if [ -n "${DSV41_PYTHON:-}" ]; then
  PY=$(command -v "$DSV41_PYTHON") || { echo "DSV41_PYTHON=$DSV41_PYTHON: no such interpreter" >&2; exit 2; }
  case $PY in /*) ;; *) PY=$PWD/$PY ;; esac # the scripts change the folder
  DSV41_PYTHON=$PY
else
  PY="$ROOT/.venv/bin/python"
  LOCK="$ROOT/requirements/cpu.txt"
  STAMP="$ROOT/.venv/locked"
  if [ -e "$ROOT/.venv" ] && [ ! -e "$STAMP" ]; then
    echo "$ROOT/.venv was not made by this script: use it with DSV41_PYTHON=.venv/bin/python, or move it away" >&2
    exit 2
  fi
  if ! cmp -s "$LOCK" "$STAMP"; then
    BASE=""
    for name in python3.11 python3.12 python3; do
      if "$name" -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
        BASE=$name
        break
      fi
    done
    [ -n "$BASE" ] || { echo "Python 3.11 or 3.12 with venv is needed (or set DSV41_PYTHON)" >&2; exit 2; }
    echo "making .venv from requirements/cpu.txt with $BASE (once; a few minutes) ..." >&2
    rm -rf "$ROOT/.venv"
    "$BASE" -m venv "$ROOT/.venv"
    : >"$STAMP"  # ours, though not complete yet
    "$PY" -m pip install -q --disable-pip-version-check -r "$LOCK" >&2
    cp "$LOCK" "$STAMP"
  fi
fi
# Four ranks share the cores of one machine: threads of their own would only fight over them.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
