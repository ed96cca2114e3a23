"""Scenes of prefill_adapters_probe.py: hc_fused against the release's own kernels, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.kernels.ops.layernorm import mhc
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from dsv41_dist.adapters import _hc_runtime, hc_fused
from dsv41_dist.engine.logical_rows import sharded_rows
from dsv41_dist.kernels import hc_fused as kernels
from tests.engine.indexer_scenes import OnGpu
from tests.engine.split_ranks import bits, runner, state_of

STREAMS, ITERATIONS = 4, 2
MIX = (2 + STREAMS) * STREAMS


def arguments(rows: int, k: int, seed: int, whole: bool, dtype=torch.bfloat16, spare: int = 0) -> tuple:
    """x [rows, k] (rows `spare` elements further apart), weight, scale, base, and the scalars of the engine's call.

    `whole`: whole numbers of a size that differs from slice to slice. Tiles then have exact sums, whatever the order
    inside, while the order of the slices shows in the bits.
    """
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k + spare, generator=gen)
    weight = torch.randn(MIX, k, generator=gen) * k**-0.5
    if whole:
        x = x.mul(4).round()
        slices = mhc._num_slices_for(k)
        power = torch.randint(0, 20, (slices,), generator=gen).repeat_interleave(k // slices)
        weight = torch.randint(-9, 9, (MIX, k), generator=gen).float() * 2.0 ** (power - 20)
        x[:, :k] *= 2.0 ** (power.flip(0) % 5)
    scale, base = torch.randn(3, generator=gen), torch.randn(MIX, generator=gen)
    return x.to(dtype)[:, :k], weight, scale, base, STREAMS, ITERATIONS, 1e-6, 1e-6


def all_bits(parts) -> list[bytes]:
    return [bits(part) for part in parts]


def hc_bits(rank, args):
    """Each plan against the stock function, byte for byte; and the order of slices, which must show."""
    stock, out = mhc.hc_mix_stats_sinkhorn.__wrapped__, {}
    cases = {
        "80 slices of 4 tiles": arguments(1, 20480, 1, True),
        "2 slices of 3 tiles, 18 rows": arguments(18, 384, 2, True),
        "rows apart, float32": arguments(5, 512, 3, True, torch.float32, spare=64),
        "a row of zeros": arguments(2, 384, 4, True),
    }
    cases["a row of zeros"][0][1] = -0.0
    for name, case in cases.items():
        want = all_bits(stock(*case))
        out[name] = {str(plan): all_bits(_hc_runtime.fused_stats(mhc, plan, case)) == want for plan in kernels.PLANS}
    # Random values: the interpreter adds in the same order for the same tile and the same form only.
    case = arguments(17, 512, 5, False)
    want = all_bits(stock(*case))
    same = [plan for plan in kernels.PLANS if plan.block_m == mhc._block_m_for(17) and not plan.vectors]
    out["random"] = {str(plan): all_bits(_hc_runtime.fused_stats(mhc, plan, case)) == want for plan in same}
    x, weight = cases["2 slices of 3 tiles, 18 rows"][:2]
    twin = kernels.mix_sums_torch(x, weight, slices=2)
    out["twin"] = {
        str(plan): all_bits(kernels.mix_sums(x, weight, slices=2, plan=plan)) == all_bits(twin)
        for plan in kernels.PLANS
    }
    x, weight = cases["80 slices of 4 tiles"][:2]
    forward = kernels.mix_sums_torch(x, weight, slices=80)
    backward = kernels.mix_sums_torch(x.flip(1), weight.flip(1), slices=80)
    out["order shows"] = all_bits(forward) != all_bits(backward)
    x, weight = arguments(17, 384, 6, False)[:2]
    vectors = [plan for plan in kernels.PLANS if plan.vectors]
    sums = {plan: kernels.mix_sums(x, weight, slices=2, plan=plan)[1] for plan in vectors}
    out["tree"] = {str(plan): bits(sums[plan]) == bits(squares(x, 2)) for plan in vectors}
    out["tree shows"] = bits(squares(x, 2)) != bits(kernels.mix_sums_torch(x, weight, slices=2)[1])
    return out


def squares(x, slices):
    """Sums of squares as the split form's layout has them: 32 columns by halves, then both halves of a tile."""
    total = torch.zeros(x.shape[0])
    for per_slice in x.float().square().split(x.shape[1] // slices, dim=1):
        part = torch.zeros(x.shape[0])
        for tile in per_slice.split(64, dim=1):
            tile = tile.view(-1, 2, 32)
            while tile.shape[2] > 1:
                tile = tile[..., : tile.shape[2] // 2] + tile[..., tile.shape[2] // 2 :]
            part += tile[:, 0, 0] + tile[:, 1, 0]
        total += part
    return total


def _attached(args):
    hc_fused._fused = None
    state = state_of("hc_fused")
    state.notes.clear()
    hc_fused.attach(runner(args, torch.nn.Module()), state)
    return state, hc_fused._fused


def _model(mode):
    """A forward of the target model that makes the statistics of one call, behind the adapter's own wrapper."""
    batch = SimpleNamespace(forward_mode=mode)
    forward = hc_fused._forward(lambda self, ids, positions, forward_batch, case: mhc.hc_mix_stats_sinkhorn(*case))
    return lambda case: forward(None, None, None, batch, case)


def hc_flow(rank, args):
    """Sizes decide and are used; what is no eager prefill of the target never is; a shard counts as its chunk."""
    state, fused = _attached(args)
    stock, prefill = mhc.hc_mix_stats_sinkhorn.__wrapped__, _model(ForwardMode.EXTEND)
    big, small = arguments(4, 384, 1, True), arguments(2, 384, 2, True)
    out = {"gate": fused._min_rows}

    def fires(call, case) -> list:
        before = state.fired
        same = all_bits(call(case)) == all_bits(stock(*case))
        return [same, state.fired - before]

    out["deciding, decided"] = [fires(prefill, big), fires(prefill, big)]
    out["too few"] = fires(prefill, small)
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        out[mode.name] = fires(_model(mode), big)
    out["outside a forward (draft stages)"] = fires(lambda case: mhc.hc_mix_stats_sinkhorn(*case), big)
    real = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    on_gpu = (big[0].as_subclass(OnGpu), *big[1:])
    before = state.fired
    prefill(on_gpu)
    out["capture"] = state.fired - before
    torch.cuda.is_current_stream_capturing = real
    with sharded_rows(2, 4):
        shard = (big[0][:2], *big[1:])
        out["shard of 2, deciding, decided"] = [fires(prefill, shard), fires(prefill, shard)]
    out["2 rows of their own"] = fires(prefill, shard)
    out["notes"], out["calls"] = list(state.notes), fused.stock_calls
    # Without a gate nothing below 512 rows is measured.
    fused._min_rows = None
    out["no gate"] = fires(prefill, big)
    out["variants"] = _variants(args)
    out["off"] = _ranks_with_other_rows(args)
    return out


def _variants(args) -> list:
    """Row counts of one power of two for which stock takes another tile height: each height is decided of its own.

    The stand-in for stock gives each height other bits; the one for the fused pass has those of the first.
    """
    state, fused = _attached(args)
    heights = {rows: mhc._block_m_for(rows) for rows in (2048, 2049, 4095)}
    case = {rows: (torch.ones(rows, 1),) for rows in heights}
    real = _hc_runtime.fused_stats
    _hc_runtime.fused_stats = lambda mhc, plan, arguments: (arguments[0] * heights[2048],)
    seen: list = []
    with fused.prefill():
        for rows in (2048, 2048, 2049, 2048, 4095):
            before = state.fired
            got = fused.run(lambda x: (x * mhc._block_m_for(x.shape[0]),), case[rows])
            seen.append([float(got[0][0]) == heights[rows], state.fired - before])
    _hc_runtime.fused_stats = real
    return [seen, list(state.notes)]


def _ranks_with_other_rows(args) -> dict:
    out = {}
    real = runtime_context.get_parallel  # the real object refuses a width that the group was not built with
    for name in ("attn_dp_size", "attn_cp_size"):
        widths = {"tp_size": 2, "attn_dp_size": 1, "attn_cp_size": 1, name: 2}
        runtime_context.get_parallel = lambda widths=widths: SimpleNamespace(**widths)
        state, fused = _attached(args)
        out[name] = [fused is None, list(state.notes)]
    runtime_context.get_parallel = real
    return out


def hc_differs(rank, args):
    """One bit on one rank, or a plan that raises there: off for good, on all ranks, for every size."""
    stock, prefill, out = mhc.hc_mix_stats_sinkhorn.__wrapped__, _model(ForwardMode.EXTEND), {}
    real = _hc_runtime.mix_sums

    def one_bit(x, weight, **how):
        mix, sq = real(x, weight, **how)
        mix.view(torch.int32)[-1, 0] ^= 1 << 20  # one that survives the coefficients
        return mix, sq

    def raises(x, weight, **how):
        raise RuntimeError("no such instruction")

    def plans_differ(x, weight, **how):
        return one_bit(x, weight, **how) if how["plan"] != kernels.PLANS[2] else real(x, weight, **how)

    for name, fake in (("one bit", one_bit), ("raises", raises), ("one plan is right", plans_differ)):
        state, fused = _attached(args)
        _hc_runtime.mix_sums = fake if rank == 1 else real
        before, same = state.fired, []
        for case in (arguments(4, 384, 1, True), arguments(4, 384, 3, True), arguments(8, 384, 4, True)):
            same.append(all_bits(prefill(case)) == all_bits(stock(*case)))
        out[name] = [same, state.fired - before, list(state.notes), fused.stock_calls]
    _hc_runtime.mix_sums = real
    return out
