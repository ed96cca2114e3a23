"""The speculative kernels on a real GPU: real shapes, graph replay with changing inputs and noise, no host sync, and
the native block kernel on the same coins where the engine is installed.

    python -m pytest tests/gpu/test_speculative_gpu.py -m gpu
"""

import ctypes
import importlib.util

import pytest
import torch

from dsv41_dist.kernels.block_verify import NoiseState, block_laws, block_verify, block_verify_torch
from dsv41_dist.kernels.verify_cap import copy_rows, copy_rows_torch, live_rows, live_rows_torch

pytestmark = pytest.mark.gpu
VOCAB, GAMMA, STRIDE = 129280, 5, 6
REPLAYS = 50


@pytest.fixture(autouse=True)
def _gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def block(bs, vocab=VOCAB, gamma=GAMMA, seed=0, agree=0.7, dtype=torch.float32, kind="plain"):
    """Arguments of block_verify for `bs` requests whose drafts were drawn from the draft's law."""
    gen = torch.Generator("cuda").manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=gen, device="cuda")

    target = 3 * noise(bs, gamma + 1, vocab)
    draft = target[:, :gamma] + agree * noise(bs, gamma, vocab)
    t_temp = 0.5 + torch.rand(bs, generator=gen, device="cuda")
    d_temp = 0.9 * t_temp
    if kind == "equal":
        draft, d_temp = target[:, :gamma].clone(), t_temp.clone()
    if kind == "sharp":  # the drafted law is within rounding of one-hot
        draft = torch.where(draft == draft.amax(-1, keepdim=True), draft + 40, draft)
        target = torch.cat([draft, target[:, gamma:]], 1) + noise(bs, gamma + 1, vocab)
    if kind == "zeros":
        target[..., ::2] = -torch.inf
    if kind == "top-1":
        target = torch.where(target == target.amax(-1, keepdim=True), target, -torch.inf)
    x = torch.multinomial(torch.softmax(draft / d_temp.view(-1, 1, 1), -1).view(-1, vocab), 1, generator=gen)
    candidates = torch.cat([torch.zeros(bs, 1, dtype=torch.int64, device="cuda"), x.view(bs, gamma)], 1)
    return {
        "candidates": candidates,
        "target": target.view(bs * (gamma + 1), vocab).to(dtype),
        "draft_logits": None if kind == "one-hot" else draft.to(dtype),
        "target_temperatures": t_temp,
        "draft_temperatures": d_temp,
    }


def reference(kwargs):
    """w and h in float64 from the same logits."""
    bs, rows = kwargs["candidates"].shape
    target = kwargs["target"].view(bs, rows, -1).double()
    p = torch.softmax(target / kwargs["target_temperatures"].double().view(-1, 1, 1), -1)
    drafts = kwargs["candidates"][:, 1:]
    if kwargs["draft_logits"] is None:
        q = torch.zeros_like(p[:, :-1]).scatter_(-1, drafts.unsqueeze(-1), 1.0)
    else:
        q = torch.softmax(kwargs["draft_logits"].double() / kwargs["draft_temperatures"].double().view(-1, 1, 1), -1)
    return block_laws(p, q, drafts)


KINDS = ["plain", "equal", "one-hot", "zeros", "top-1", "sharp"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bs", "dtype"), [(1, torch.float32), (8, torch.float32), (8, torch.bfloat16)])
def test_thresholds_are_those_of_float64_at_the_real_vocabulary(kind, bs, dtype):
    kwargs = block(bs, dtype=dtype, kind=kind)
    w, h, _ = reference(kwargs)
    # Coins of 0: every threshold is computed.
    got = block_verify(**kwargs, noise=NoiseState(1, "cuda"), coins=torch.zeros(bs, GAMMA, device="cuda"))
    torch.testing.assert_close(got.weights.double(), w, rtol=1e-4, atol=1e-6)
    wanted = torch.where(w > 1 - 1e-6, got.thresholds.double(), h)  # 0 / 0 there
    torch.testing.assert_close(got.thresholds.double(), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_decides_as_its_twin_over_a_thousand_requests(kind):
    bs, vocab, decided, differ = 32, 3001, 0, 0
    ours, twin = NoiseState(5, "cuda"), NoiseState(5, "cuda")
    for seed in range(35):
        kwargs = block(bs, vocab, gamma=1 + seed % 5, seed=seed, kind=kind)
        live = None
        if seed % 3 == 0:
            live = torch.randint(2, 3 + seed % 5, (bs,), device="cuda", dtype=torch.int32)
        got = block_verify(**kwargs, noise=ours, live=live)
        want = block_verify_torch(**kwargs, noise=twin, live=live)
        differ += int(((got.correct_len != want.correct_len) | (got.bonus != want.bonus)).sum())
        decided += bs
        torch.testing.assert_close(got.weights, want.weights, rtol=1e-4, atol=1e-6)
    assert decided >= 1000
    assert torch.equal(ours.state, twin.state)
    # A coin or a race within float rounding of another outcome may fall either way; the noise is fixed by its key.
    assert differ <= 2, differ


def test_the_native_kernel_decides_the_same_from_the_same_coins():
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang 0.5.22 or 0.5.23")
    from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

    differ = compared = 0
    for seed in range(40):
        bs, kind = 32, KINDS[seed % 6]
        kwargs = block(bs, 4099, seed=seed, kind=kind)
        p = torch.softmax(kwargs["target"] / kwargs["target_temperatures"].repeat_interleave(STRIDE).view(-1, 1), -1)
        if kwargs["draft_logits"] is None:
            q = torch.zeros(bs, GAMMA, 4099, device="cuda").scatter_(-1, kwargs["candidates"][:, 1:, None], 1.0)
        else:
            q = torch.softmax(kwargs["draft_logits"] / kwargs["draft_temperatures"].view(-1, 1, 1), -1)
        coins = torch.rand(bs, GAMMA, device="cuda")
        number = torch.zeros(bs, dtype=torch.int32, device="cuda")
        chain_speculative_sampling_triton(
            torch.zeros(bs * STRIDE, dtype=torch.int32, device="cuda"),
            torch.zeros(bs, STRIDE, dtype=torch.int32, device="cuda"),
            number,
            kwargs["candidates"],
            torch.arange(bs * STRIDE, device="cuda").view(bs, STRIDE),
            None,
            None,
            coins,
            torch.rand(bs, device="cuda"),
            p.view(bs, STRIDE, -1).contiguous(),
            q.contiguous(),
            1.0,
            1.0,
            True,
            block_verification=True,
        )
        verdict = block_verify(**kwargs, noise=NoiseState(1, "cuda"), coins=coins)
        _, h, _ = reference(kwargs)
        near = ((coins.double() - h[:, 1:]).abs() < 1e-5).any(-1)
        differ += int(((verdict.correct_len != number) & ~near).sum())
        compared += bs
    assert compared >= 1000
    assert differ == 0


@pytest.mark.parametrize("bs", [1, 16])
def test_a_graph_replays_new_inputs_and_new_noise_without_a_host_sync(bs):
    static = block(bs, seed=0)
    live = torch.full((bs,), STRIDE, dtype=torch.int32, device="cuda")
    noise, eager = NoiseState(9, "cuda"), NoiseState(9, "cuda")
    block_verify(**static, noise=NoiseState(9, "cuda"), live=live)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = block_verify(**static, noise=noise, live=live)
    for seed in range(1, REPLAYS + 1):
        fresh = block(bs, seed=seed)
        lengths = torch.randint(2, STRIDE + 1, (bs,), device="cuda", dtype=torch.int32)
        want = block_verify(**fresh, noise=eager, live=lengths)
        for name, tensor in fresh.items():
            static[name].copy_(tensor)
        live.copy_(lengths)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for got, wanted in zip(verdict, want, strict=True):
            assert torch.equal(got, wanted)
    assert noise.state.tolist() == eager.state.tolist() == [9, REPLAYS]


def step(kwargs, noise, live, programs):
    from dsv41_dist.kernels.block_verify_triton import launch

    return launch(*kwargs.values(), noise, live, None, programs=programs)


def same_bytes(got, wanted):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, wanted, strict=True))


def kernels_of(graph):
    """(kernel nodes, how many of them are cooperative launches) of a captured graph, which must have no other nodes."""
    cuda = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert cuda.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert cuda.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    cooperative = 0
    for node in nodes:
        kind, value = ctypes.c_int(-1), (ctypes.c_int * 16)()  # a CUlaunchAttributeValue has 64 bytes
        assert cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        assert kind.value == 0, f"a node of kind {kind.value} is not a kernel"
        assert (
            cuda.cuGraphKernelNodeGetAttribute(ctypes.c_void_p(node), 2, value) == 0
        )  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative += value[0]
    return count.value, cooperative


@pytest.mark.parametrize("bs", [1, 8, 64])
def test_one_launch_gives_the_bytes_of_four_eagerly_and_in_graph_replay(bs):
    from dsv41_dist.kernels.block_verify_triton import programs_at_once

    at_once = programs_at_once(torch.device("cuda"))
    assert at_once >= torch.cuda.get_device_properties(0).multi_processor_count
    static, live = block(bs), torch.full((bs,), STRIDE, dtype=torch.int32, device="cuda")
    one, four, eager = (NoiseState(9, "cuda") for _ in range(3))
    for programs, noise in ((at_once, NoiseState(9, "cuda")), (0, NoiseState(9, "cuda"))):
        step(static, noise, live, programs)  # compiles
    torch.cuda.synchronize()
    graphs = {}
    for programs, noise in ((at_once, one), (0, four)):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            verdict = step(static, noise, live, programs)
        graphs[programs] = graph, verdict
    assert kernels_of(graphs[at_once][0]) == (1, 1)
    assert kernels_of(graphs[0][0]) == (4, 0)
    seen = set()
    for seed in range(1, REPLAYS + 1):
        for name, tensor in block(bs, seed=seed).items():
            static[name].copy_(tensor)
        live.copy_(torch.randint(2, STRIDE + 1, (bs,), device="cuda", dtype=torch.int32))
        for graph, _ in graphs.values():
            graph.replay()
        wanted = step(static, eager, live, at_once)
        assert same_bytes(graphs[at_once][1], graphs[0][1]), seed
        assert same_bytes(graphs[at_once][1], wanted), seed
        seen.update(wanted[1].tolist())
    assert len(seen) > REPLAYS / 2, "the replays chose few tokens: the comparison shows little"
    assert one.state.tolist() == four.state.tolist() == eager.state.tolist() == [9, REPLAYS]
    assert [noise.arrivals.item() for noise in (one, eager, four)] == [(3 * REPLAYS) << 32, (3 * REPLAYS) << 32, 0]


@pytest.mark.parametrize("kind", ["one-hot", "sharp", "probabilities"])
def test_one_launch_gives_the_bytes_of_four_for_other_laws(kind):
    from dsv41_dist.kernels.block_verify_triton import launch, programs_at_once

    kwargs, coins = block(8, kind=kind), None
    if kind == "probabilities":
        coins = torch.rand(8, GAMMA, device="cuda")
        kwargs["target"], kwargs["target_temperatures"] = kwargs["target"].softmax(-1), None
    one, four = NoiseState(3, "cuda"), NoiseState(3, "cuda")
    for _ in range(3):
        got = launch(*kwargs.values(), one, None, coins, programs=programs_at_once(torch.device("cuda")))
        assert same_bytes(got, launch(*kwargs.values(), four, None, coins, programs=0))
    assert torch.equal(one.state, four.state)


def test_grids_of_any_size_share_a_state_and_one_that_does_not_fit_is_refused():
    from dsv41_dist.kernels.block_verify_triton import programs_at_once

    kwargs, live = block(8), torch.full((8,), STRIDE, dtype=torch.int32, device="cuda")
    one, four = NoiseState(4, "cuda"), NoiseState(4, "cuda")
    for number, programs in enumerate((1, 7, programs_at_once(torch.device("cuda")), 2, 131), 1):
        assert same_bytes(step(kwargs, one, live, programs), step(kwargs, four, live, 0)), programs
        assert one.arrivals.item() == (3 * number) << 32
    with pytest.raises(RuntimeError, match=r"(?i)cooperative"):
        step(kwargs, one, live, 2**20)
    assert same_bytes(step(kwargs, one, live, 3), step(kwargs, four, live, 0))


def test_an_eager_call_never_waits_for_the_device():
    kwargs = block(4)
    noise, live = NoiseState(1, "cuda"), torch.full((4,), 3, dtype=torch.int32, device="cuda")
    block_verify(**kwargs, noise=noise, live=live)
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_verify(**kwargs, noise=noise, live=live)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_it_emits_has_the_target_s_law():
    """Chi-square over 200,000 requests with one law: the first emitted token against p_0."""
    bs, vocab = 200_000, 16
    gen = torch.Generator("cuda").manual_seed(3)
    target = torch.randn(1, 3, vocab, generator=gen, device="cuda").expand(bs, 3, vocab).contiguous()
    draft = torch.randn(1, 2, vocab, generator=gen, device="cuda").expand(bs, 2, vocab).contiguous()
    x = torch.multinomial(torch.softmax(draft.view(-1, vocab), -1), 1, generator=gen).view(bs, 2)
    candidates = torch.cat([torch.zeros(bs, 1, dtype=torch.int64, device="cuda"), x], 1)
    ones = torch.ones(bs, device="cuda")
    verdict = block_verify(
        candidates=candidates,
        target=target.view(-1, vocab),
        draft_logits=draft,
        target_temperatures=ones,
        draft_temperatures=ones,
        noise=NoiseState(21, "cuda"),
    )
    first = torch.where(verdict.correct_len > 0, x[:, 0], verdict.bonus)
    wanted = bs * torch.softmax(target[0, 0].double(), -1)
    counts = torch.bincount(first, minlength=vocab).double()
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 37.7  # 0.1 % point of 15 degrees of freedom


@pytest.mark.parametrize("bs", [1, 2, 64])
def test_live_rows_and_the_copy_are_their_twins_in_graph_replay(bs):
    gen = torch.Generator("cuda").manual_seed(bs)
    confidence = torch.rand(bs, GAMMA, generator=gen, device="cuda")
    thresholds = torch.tensor([0.5, 0.4, 0.3, 0.2], device="cuda")
    live = torch.full((bs,), STRIDE, dtype=torch.int32, device="cuda")
    in_use = torch.tensor([max(1, bs - 1) * STRIDE], dtype=torch.int32, device="cuda")
    routing = [
        torch.rand(bs * STRIDE, 6, generator=gen, device="cuda"),
        torch.randint(0, 384, (bs * STRIDE, 6), generator=gen, device="cuda", dtype=torch.int32),
        torch.randint(0, 1 << 30, (bs * STRIDE, 6), generator=gen, device="cuda", dtype=torch.int32),
    ]
    outs = [tensor.clone() for tensor in routing]

    def step():
        live_rows(confidence, thresholds, live)
        for out, tensor in zip(outs, routing, strict=True):
            out.copy_(tensor)
        copy_rows(*outs, live, STRIDE, in_use)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(REPLAYS):
        confidence.copy_(torch.rand(bs, GAMMA, device="cuda", generator=gen))
        confidence[seed % bs, 2] = torch.nan
        graph.replay()
        wanted = live_rows_torch(confidence, thresholds, torch.zeros_like(live))
        assert torch.equal(live, wanted)
        twins = [tensor.clone() for tensor in routing]
        copy_rows_torch(*twins, wanted, STRIDE, in_use)
        for out, twin in zip(outs, twins, strict=True):
            assert torch.equal(out, twin)


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.float32), (384, torch.float32), (384, torch.bfloat16)])
@pytest.mark.parametrize("bs", [1, 2, 16, 64])
def test_the_live_router_is_the_stock_router_and_a_row_copy(experts, dtype, bs):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang 0.5.21 to 0.5.23")
    from pathlib import Path

    from sglang.kernels.ops.moe import moe_fused_gate as stock

    from dsv41_dist.adapters._router_live_source import load

    router = load(Path(stock.__file__).read_text("utf-8"))
    gen = torch.Generator("cuda").manual_seed(bs)
    rows = bs * STRIDE
    scores = torch.randn(rows, experts + 8, generator=gen, device="cuda").to(dtype)[:, :experts]
    scores[:, 10] = scores[:, 11]
    bias, alt = (torch.randn(experts, generator=gen, device="cuda") for _ in range(2))
    ids = torch.randint(0, 5, (rows,), generator=gen, device="cuda")
    in_use = torch.tensor(max(1, bs - 1) * STRIDE, dtype=torch.int32, device="cuda")
    live = torch.full((bs,), STRIDE, dtype=torch.int32, device="cuda")

    def route(function, packed, **extra):
        return function(
            scores, bias, topk=6, scoring_func="sqrtsoftplus", renormalize=True, renormalize_epsilon=1e-20,
            sqrtsoftplus_log1p=True, routed_scaling_factor=1.5, apply_routed_scaling_factor_on_output=True,
            bias_alt=alt, input_ids=ids, bias_alt_token_id=3, num_token_non_padded=in_use, packed_out=packed, **extra,
        )  # fmt: skip

    packed = torch.zeros(rows, 6, dtype=torch.int32, device="cuda")
    route(router.moe_fused_gate, packed, live=live, live_stride=STRIDE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, chosen = route(router.moe_fused_gate, packed, live=live, live_stride=STRIDE)
    moved = 0
    for number in range(REPLAYS):
        scores.copy_(torch.randn(rows, experts, generator=gen, device="cuda"))
        scores[:, 10] = scores[:, 11]
        ids.copy_(torch.randint(0, 5, (rows,), generator=gen, device="cuda"))
        in_use.fill_(max(1, bs - number % 2) * STRIDE)
        live.copy_(torch.randint(2, STRIDE + 1, (bs,), generator=gen, device="cuda", dtype=torch.int32))
        graph.replay()
        third = torch.zeros_like(packed)
        want = [*route(stock.moe_fused_gate, third), third]
        plain = want[1].clone()
        copy_rows(*want, live, STRIDE, in_use)
        moved += int((want[1] != plain).any(-1).sum())
        for got, wanted in zip((weights, chosen, packed), want, strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert moved > REPLAYS / 2, "the live rows changed no routing: the comparison shows nothing"
