#!/usr/bin/env bash
# Make a virtual environment that imports the real SGLang classes on CPU, and fetch the published wheels that
# tests/engine and `doctor` read. Idempotent and bounded; prints the interpreter's path as its last line.
#
#   launch/engine_env.sh            all of it (about 3 GB: torch, triton and transformers; 2 to 5 minutes the first time)
#   launch/engine_env.sh --wheels   only the wheels, downloaded and unpacked (about 0.5 GB)
#
# DSV41_PYTHON: the interpreter to start from (default python3; 3.11 or 3.12).
# XDG_CACHE_HOME: where things are kept (default ~/.cache), in dsv41_dist/{engine-venv,wheels,engines}.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/dsv41_dist"
venv="$cache/engine-venv"
python="${DSV41_PYTHON:-python3}"
releases=(0.5.21 0.5.22 0.5.23)
torch=torch==2.13.0
pip_args=(--quiet --disable-pip-version-check --retries 3 --timeout 60)

say() { echo "engine_env: $*" >&2; }

case "$#:${1-}" in
  0: | 1:--wheels) ;;
  *) say "'$*': allowed is no argument, or --wheels"; exit 2 ;;
esac
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
  say "DSV41_PYTHON=$python: allowed is Python 3.11 or 3.12"
  exit 2
}
mkdir -p "$cache/wheels" "$cache/engines"
exec 9>"$cache/lock"
flock --timeout 1800 9 || { say "another run holds $cache/lock for half an hour"; exit 1; }

for release in "${releases[@]}"; do
  if ! compgen -G "$cache/wheels/sglang-$release-*.whl" >/dev/null; then
    say "downloading the sglang $release wheel"
    timeout 600 "$python" -m pip download "${pip_args[@]}" --no-deps --only-binary=:all: \
      --dest "$cache/wheels" "sglang==$release"
  fi
  if [[ ! -f "$cache/engines/$release/.complete" ]]; then
    say "unpacking sglang $release"
    rm -rf "$cache/engines/$release" "$cache/engines/$release.partial"
    wheel="$(compgen -G "$cache/wheels/sglang-$release-*.whl" | head -n 1)"
    "$python" -m zipfile -e "$wheel" "$cache/engines/$release.partial"
    touch "$cache/engines/$release.partial/.complete"
    mv "$cache/engines/$release.partial" "$cache/engines/$release"
  fi
done
[[ "${1:-}" == --wheels ]] && exit 0

wanted="$(cat "$here/requirements/engine-cpu.txt" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)"
if [[ "$(cat "$venv/.complete" 2>/dev/null || true)" != "$wanted" ]]; then
  say "making $venv"
  [[ -x "$venv/bin/python" ]] || timeout 120 "$python" -m venv "$venv"
  # torch by itself and exactly so: a plain `torch` in a longer list may be resolved to another build.
  timeout 1200 "$venv/bin/pip" install "${pip_args[@]}" "$torch"
  constraint="$(mktemp)"
  trap 'rm -f "$constraint"' EXIT
  echo "$torch" >"$constraint"
  timeout 1800 "$venv/bin/pip" install "${pip_args[@]}" -c "$constraint" -r "$here/requirements/engine-cpu.txt"
  timeout 600 "$venv/bin/pip" install "${pip_args[@]}" --no-deps "sglang==${releases[-1]}"
  echo "$wanted" >"$venv/.complete"
fi
say "ready: DSV41_ENGINE_PYTHON=$venv/bin/python"
echo "$venv/bin/python"
