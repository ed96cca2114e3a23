"""Compile every speculative kernel for sm90. A GPU is not needed; TRITON_INTERPRET must not be set."""

from __future__ import annotations

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv41_dist.kernels import block_verify_triton as block
from dsv41_dist.kernels import verify_cap_triton as cap

INTS = {"live", "lengths", "best_at", "ids", "packed", "rows_in_use", "out"}
LONGS = {"candidates", "state", "bonus", "arrivals"}


def kind(name, half):
    if name.startswith(("target_stride", "draft_stride", "stride_")):
        return "i32"
    if name in ("bs", "vocab", "tiles", "confidence_stride"):
        return "i32"
    if name in INTS:
        return "*i32"
    if name in LONGS:
        return "*i64"
    return "*bf16" if half and name in ("target", "draft") else "*fp32"


def compiles(kernel, constants, warps=4, half=False, **options):
    """The kernel's assembly."""
    signature = {n: "constexpr" if n in constants else kind(n, half) for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    out = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})
    assert out.asm["cubin"]
    assert out.metadata.launch_cooperative_grid == options.get("launch_cooperative_grid", False)
    return out.asm["ptx"]


for gamma, target, draft, live, coins, half in [
    (5, True, True, False, False, False),
    (5, True, True, True, False, True),
    (5, False, True, True, True, False),
    (1, True, False, True, False, False),
]:
    c = {"GAMMA": gamma, "HAS_TARGET": target, "HAS_DRAFT": draft, "HAS_LIVE": live, "HAS_COINS": coins}
    c |= {"TILE": 4096, "TILES": 32}
    one = compiles(block._verify, c | {"PHASE": 0}, 8, half, launch_cooperative_grid=True, maxnreg=block._registers(8))
    # A barrier arrives with a release and waits with an acquire; nothing is read through the cache for constants, which
    # would not see what other programs stored.
    barriers = 3 if gamma > 1 else 2
    assert one.count("atom.global.gpu.acq_rel.add") == barriers
    assert one.count("ld.global.gpu.acquire") + one.count("atom.global.gpu.acquire") == barriers
    assert ".nc" not in one
    for phase in (1, 2, 3, 4):
        if gamma > 1 or phase != 2:
            assert "acq" not in compiles(block._verify, c | {"PHASE": phase}, 8, half)
for gamma in (1, 5):
    compiles(cap._live_rows, {"GAMMA": gamma}, 1)
for packed, padding in itertools.product((False, True), repeat=2):
    compiles(cap._copy_rows, {"STRIDE": 6, "K": 6, "BLOCK_K": 8, "HAS_PACKED": packed, "HAS_PADDING": padding}, 1)
print("compiled")
