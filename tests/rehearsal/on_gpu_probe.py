"""Run by the engine's interpreter: the GPU stand-ins beside torch in fp64, in Triton's interpreter, their signatures,
and whether the engine knows the rehearsal's arguments. Prints JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable

import torch

torch.set_num_threads(1)

from dsv41_dist.rehearsal.settings import Boot  # noqa: E402
from dsv41_dist.rehearsal.stand_ins import row_kernels  # noqa: E402
from dsv41_dist.rehearsal.worker import server_arguments  # noqa: E402


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the value."""
    return float(((a.double() - b).abs() / b.abs().clamp(min=1e-3)).max())


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except NotImplementedError as error:
        return str(error)
    return "taken"


def main() -> None:
    out: dict[str, object] = {}
    # fp32: the interpreter cuts bf16 off where a GPU rounds it.
    for rows, width in ((1, 256), (5, 320), (7, 1792)):
        x, residual, weight = draw(1, rows, width), draw(2, rows, width), draw(3, width)
        got = row_kernels.rmsnorm(x, weight, 1e-6)
        given, into = x.clone(), torch.empty_like(x)
        row_kernels.rmsnorm(given, weight, 1e-6, out=into)
        alone = torch.cat([row_kernels.rmsnorm(row, weight, 1e-6) for row in x.split(1)])
        summed, normed = residual.clone(), x.clone()
        row_kernels.fused_add_rmsnorm(normed, summed, weight, 1e-6)
        out[f"{rows} x {width}"] = {
            "rmsnorm": worst(got, norm(x, weight, 1e-6)),
            "into": torch.equal(into, got) and torch.equal(given, x),
            "rows alone": torch.equal(alone, got),
            "sum": torch.equal(summed, x + residual),
            "normed": worst(normed, norm(x + residual, weight, 1e-6)),
        }
    gate_up = draw(4, 3, 64)
    gate, up = gate_up.double().chunk(2, -1)
    into = torch.empty(3, 32)
    out["silu"] = worst(row_kernels.silu_and_mul(gate_up, into), torch.nn.functional.silu(gate) * up)
    out["silu in place"] = torch.equal(into, row_kernels.silu_and_mul(gate_up))
    x, weight = draw(5, 3, 8), torch.ones(8)
    wrong = {
        "three dimensions": lambda: row_kernels.rmsnorm(draw(6, 2, 3, 4), torch.ones(4)),
        "strided weight": lambda: row_kernels.rmsnorm(x, torch.ones(16)[::2]),
        "strided out": lambda: row_kernels.rmsnorm(x, weight, out=torch.zeros(3, 16)[:, :8]),
        "short out": lambda: row_kernels.rmsnorm(x, weight, out=torch.zeros(2, 8)),
        "strided residual": lambda: row_kernels.fused_add_rmsnorm(x.clone(), torch.zeros(3, 16)[:, :8], weight),
        "short residual": lambda: row_kernels.fused_add_rmsnorm(x.clone(), torch.zeros(1, 8), weight),
    }
    out["refused"] = {what: refusal(call) for what, call in wrong.items()}

    functions = (row_kernels.rmsnorm, row_kernels.fused_add_rmsnorm, row_kernels.silu_and_mul)
    out["signatures"] = {f.__name__: list(inspect.signature(f).parameters) for f in functions}

    from sglang.srt.server_args import ServerArgs

    known = set(inspect.signature(ServerArgs).parameters)
    boot = Boot("", (), device="cuda", graphs=True, absent=("sgl_kernel", "flashinfer"), speculative=True)
    out["unknown arguments"] = sorted(set(server_arguments(boot)) - known)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
