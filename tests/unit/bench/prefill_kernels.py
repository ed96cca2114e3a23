"""The row kernels of `bench prefill` against their twins, and rows against fewer rows: in Triton's interpreter, or on a
GPU. No test framework here: other interpreters run it too. As a module it compiles the kernels for sm90."""

from __future__ import annotations

import torch

from dsv41_dist.cli.prefill_rows import STREAMS, TILE, combine_norm, make_mixer, mix, post

CASES = 4
_HIDDEN = (64, 256, 272, 1024)


def run(device: str = "cpu", hiddens: tuple[int, ...] = _HIDDEN, rows: int = 2 * TILE) -> int:
    """How many cases passed; an AssertionError says which did not."""
    from dsv41_dist.cli import prefill_rows_triton as kernels

    for hidden in hiddens:
        gen = torch.Generator().manual_seed(hidden)
        residual = torch.randn(rows, STREAMS, hidden, generator=gen).bfloat16()
        y = torch.randn(rows, hidden, generator=gen).bfloat16()
        weight = torch.rand(hidden, generator=gen).bfloat16()
        mixer = make_mixer(hidden, 1, torch.device("cpu"))
        want = mix(residual, mixer)
        left, read = post(residual, y, *want[1:]), combine_norm(residual, want[0], weight)
        there = [tensor.to(device) for tensor in (residual, y, weight, *want)]
        on = type(mixer)(*(tensor.to(device) for tensor in mixer))
        got = kernels.launch_mix(there[0], on)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=1e-5)
        # The interpreter's cast to bf16 cuts off, a GPU's rounds to nearest.
        close = {"rtol": 2**-7, "atol": 2**-7}
        torch.testing.assert_close(
            kernels.launch_post(there[0], there[1], *there[4:]).cpu().float(), left.float(), **close
        )
        normed = kernels.launch_combine_norm(there[0], there[3], there[2])
        torch.testing.assert_close(normed.cpu().float(), read.float(), **close)
        for at in range(0, rows, TILE):
            part = slice(at, at + TILE)
            mine = kernels.launch_mix(there[0][part], on)
            assert all(torch.equal(a, b[part]) for a, b in zip(mine, got, strict=True)), (hidden, at)
            again = kernels.launch_combine_norm(there[0][part], there[3][part], there[2])
            assert torch.equal(again, normed[part]), (hidden, at)
    return len(hiddens)


def compile_for_sm90() -> None:
    """A GPU is not needed; TRITON_INTERPRET must not be set."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dsv41_dist.cli import prefill_rows_triton as kernels

    halves, whole = {"residual", "y", "out", "weight", "parts"}, {"hidden", "rows", "k", "slice_k"}
    sinkhorn = {"SLICES": 8, "TILE": TILE, "PADDED": 32, "S": STREAMS, "ITERATIONS": 20, "EPS": 1e-6}
    for kernel, constants, warps in (
        (kernels._post, {"S": STREAMS, "BLOCK": 1024}, 4),
        (kernels._combine_norm, {"EPS": 1e-6, "S": STREAMS, "BLOCK": 8192}, 8),
        (kernels._mix_parts, {"TILE": TILE, "PADDED": 32, "BLOCK": 128, "WIDE": False}, 4),
        (kernels._mix_finish, sinkhorn, 1),
    ):
        signature = {
            n: "constexpr" if n in constants else "i32" if n in whole else "*bf16" if n in halves else "*fp32"
            for n in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 1})
        assert done.asm["cubin"]


if __name__ == "__main__":
    compile_for_sm90()
    print("compiled")
