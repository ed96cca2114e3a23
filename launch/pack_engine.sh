#!/usr/bin/env bash
# Pack the published SGLang for a GPU machine that has torch, triton, transformers and CUDA but no network: sources without
# compiled extensions, and the pure or small wheels it imports (Python 3.12). About 40 MB; over 48 MB is an error.
#
#   launch/pack_engine.sh FOLDER          writes FOLDER/engine.tar.xz, FOLDER/wheels/, FOLDER/unpack.sh
#
# On the GPU machine:  bash FOLDER/unpack.sh TARGET   and put TARGET first on PYTHONPATH.
# sgl_kernel and deep_gemm are left out: their binaries need the torch that this release pins. Only the metadata of
# sglang-kernel travels, because the engine asserts its version.
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: launch/pack_engine.sh FOLDER" >&2; exit 2; }
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"
release=0.5.23
out=$1
cache="${XDG_CACHE_HOME:-$HOME/.cache}/dsv41_dist"
tree="$cache/engines/$release"
[ -f "$tree/sglang/__init__.py" ] || DSV41_PYTHON="$PY" "$ROOT/launch/engine_env.sh" --wheels
mkdir -p "$out/wheels"

# hardware_backend/npu is imported by the engine, multimodal_gen and the Ascend tests are not.
tar -C "$tree" -cJf "$out/engine.tar.xz" --exclude='*.so' --exclude='*.so.*' --exclude=__pycache__ \
  --exclude=sglang/multimodal_gen --exclude=sglang/test/ascend sglang "sglang-$release.dist-info"

wanted=(annotated-doc annotated-types anyio apache-tvm-ffi asttokens compressed-tensors dill distro executing fastapi gguf
  h11 httpcore httpx ipython jedi jiter loguru matplotlib-inline msgspec openai opentelemetry-api orjson parso
  partial-json-parser pexpect prompt_toolkit pure_eval pybase64 pydantic pydantic_core python-multipart pyzmq setproctitle sniffio
  stack-data starlette traitlets typing-inspection uvicorn uvloop wcwidth xgrammar)
pins=()
for name in "${wanted[@]}"; do
  pin=$(grep -i "^$name==" "$ROOT/requirements/engine-cpu.txt") || { echo "$name: not in requirements/engine-cpu.txt" >&2; exit 1; }
  pins+=("$pin")
done
# FlashMLA's kernels are a package of their own, which loads with this torch; the CPU environment has no use for it.
pins+=("$(sed -n 's/^Requires-Dist: \(sgl-flash-mla==[^ ;]*\).*/\1/p' "$tree/sglang-$release.dist-info/METADATA")")
timeout 900 "$PY" -m pip download --quiet --disable-pip-version-check --retries 3 --timeout 60 --no-deps \
  --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform any --dest "$out/wheels" "${pins[@]}"

cat >"$out/unpack.sh" <<'UNPACK'
#!/usr/bin/env bash
# Unpack beside this file's packages into the folder given, for PYTHONPATH.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p "$1"
tar -C "$1" -xJf "$here/engine.tar.xz"
python3 -m pip install --quiet --no-index --no-deps --target "$1" "$here"/wheels/*.whl
mkdir -p "$1/sglang_kernel-0.4.10.dist-info"
printf 'Metadata-Version: 2.1\nName: sglang-kernel\nVersion: 0.4.10\n' >"$1/sglang_kernel-0.4.10.dist-info/METADATA"
UNPACK
bytes=$(du -sb "$out" | cut -f1)
echo "$out: $((bytes / 1000000)) MB"
[ "$bytes" -le 48000000 ] || { echo "over 48 MB" >&2; exit 1; }
