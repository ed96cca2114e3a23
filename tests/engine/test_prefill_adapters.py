"""The indexer's adapters and hc_fused on real functions of three releases; prefill_adapters_probe.py runs in the
engine's Python and forks the ranks. The indexer's GPU kernels are stand-ins (indexer_fakes.py), hc_fused meets the
engine's own."""

from __future__ import annotations

import pytest

from dsv41_dist.adapters import REGISTRY
from dsv41_dist.engine import gpus
from dsv41_dist.engine.armed import enabled
from dsv41_dist.engine.gates import Gates
from tests.engine.real import RELEASES, scenes

pytestmark = pytest.mark.timeout(500)
SCENES = {
    "0.5.21": ["sm12x:1", "scenarios:4", "hc_flow:1"],
    "0.5.22": ["sm12x:1", "scenarios:4", "hc_flow:1"],
    "0.5.23": [
        *("sm12x:1", "scenarios:2", "scenarios:3", "scenarios:4", "verdicts:2", "never:2", "chunked:1"),
        "short_first:2",
        *("hc_bits:1", "hc_flow:2", "hc_differs:2"),
    ],
}
GATES = {
    "DSV41_SM12X_DENSE": "1",
    "SPARK_PREFILL_TP_SPLIT": "1",
    "SPARK_PREFILL_MIN_ROWS": "8",
    "DSV41_INDEXER_CHUNKED": "1",
    "DSV41_INDEXER_BUDGET_MB": "16",
    "DSV41_HC_FUSED": "1",
    "DSV41_HC_FUSED_MIN": "4",
    "DSV41_COMM_TIMEOUT_S": "60",
}


@pytest.fixture(scope="module")
def probe(engine_python, published):
    return scenes(engine_python, published, "prefill_adapters_probe.py", SCENES, **GATES)


# ---------- sm12x_dense_candidates ----------


@pytest.mark.parametrize("release", RELEASES)
def test_sm12x_gets_the_dense_scheme_and_nothing_else_changes(probe, release):
    (out,) = probe(release, "sm12x:1")
    for key, (stock, ours) in out["seen"].items():
        capability, scores, topk_blocks = key.split()
        raises = float(capability) >= 10 and topk_blocks == "2048"
        assert stock.startswith("RuntimeError: the candidate indexer needs DeepGEMM") == raises, (key, stock)
        if capability.startswith("12") and raises:
            assert ours == f"DenseBlocksBackend one ['pool', 'table', 2048, 8] {scores == 'deep_gemm'}", key
        else:
            assert ours == stock, key
    state = out["state"]
    assert (state["state"], state["fired"], state["rebound_copies"]) == ("fired", 4, 0)
    assert state["notes"] == [
        "dense candidate blocks for prefill (scores by torch) and decode",
        "dense candidate blocks for prefill (scores by DeepGEMM) and decode",
    ]


class Nvml:
    """A driver's management library: what it knows of each device, or an error number in its place."""

    def __init__(self, *devices, init=0):
        self.devices, self.init, self.ended = devices, init, 0

    def nvmlInit_v2(self):
        return self.init

    def nvmlShutdown(self):
        self.ended += 1

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.devices)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        known = self.devices[device.value - 1]
        if isinstance(known, int):
            return known
        major._obj.value, minor._obj.value = known
        return 0


@pytest.mark.parametrize(
    ("devices", "auto"),
    [([], False), ([(9, 0)], False), ([(12, 1)], True), ([(9, 0), (12, 0)], True), ([3, (12, 0)], True), ([3], False)],
)
def test_auto_asks_the_driver(monkeypatch, devices, auto):
    nvml = Nvml(*devices)
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: nvml)
    assert gpus.compute_capabilities() == [known for known in devices if isinstance(known, tuple)]
    assert nvml.ended == 1
    for text, want in (("auto", auto), ("0", False), ("1", True)):
        on = enabled(Gates.from_env({"DSV41_SM12X_DENSE": text, "DSV41_FOLDED_FENCE": "1"}), REGISTRY)
        assert on == {"folded_result_fence", *(["sm12x_dense_candidates"] if want else [])}


def test_no_driver_and_a_driver_that_does_not_start_are_no_gpu(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", absent)
    assert gpus.compute_capabilities() == []
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Nvml((12, 1), init=9))
    assert gpus.compute_capabilities() == []


# ---------- spark_prefill_dense ----------

FLOWS = 3 * 2 * (2 * 3 + 3)  # schemes, kinds of publishing, batches: two at three tile budgets, three at one


# Rows of each batch, and of its tail of five rows a request.
ROWS = {
    "ragged": (69, 18),
    "empty requests": (60, 13),
    "one request": (70, 5),
    "from the first token": (48, 10),
    "nothing visible yet": (22, 7),
}


def selections_of(scheme, batch, tiles, publishing):
    """(layer, rows) of each selection of a flow: two full top-k layers, a source, a consumer or two."""
    rows, tail = ROWS[batch]
    consumer = "table consumer" if scheme == "table" else "consumer"
    full = [("full top-k", rows)] * 2
    if publishing == "tail-only publish":
        return [*full, ("source", tail), (consumer, tail)]
    return [*full, ("source", rows), (consumer, rows), *([(consumer, tail)] if tail >= 8 else [])]


@pytest.mark.parametrize(
    ("release", "world"), [("0.5.21", 4), ("0.5.22", 4), ("0.5.23", 2), ("0.5.23", 3), ("0.5.23", 4)]
)
def test_picks_and_blocks_have_the_bytes_of_the_stock_selection(probe, release, world):
    """Page indices, raw indices and everything published: ragged batches, requests without rows, contexts of nothing,
    full and tail-only publishing, consumption by all rows and by the tail's, tiles from four rows to one tile."""
    ranks = probe(release, f"scenarios:{world}")
    flows = [{k: v for k, v in one["results"].items() if "same" in v} for one in ranks]
    assert len(flows[0]) == FLOWS
    for key in flows[0]:
        seen = [one[key] for one in flows]
        assert all(all(one["same"]) for one in seen), (key, seen)
        whole, divided = seen[0]["rows"][0], sum(one["rows"][1] for one in seen)
        selections = selections_of(*key.split(", "))
        fires = [rows >= 8 and -(-rows // 4) >= world for layer, rows in selections if layer != "table consumer"]
        assert [one["fired"] for one in seen] == [sum(fires)] * world, (key, seen)
        # What was divided was scored once by the group; what was too small for it, once by each rank.
        if all(fires):
            assert divided == whole, (key, seen)
        else:
            assert whole < divided < whole * world or not any(fires), (key, seen)
    calls = [{k: v for k, v in one["results"].items() if "same" not in v} for one in ranks]
    assert all(one == calls[0] for one in calls)
    reasons = {why for counts in calls[0].values() for why in counts}
    few = "cannot split 10 rows: 3 tiles of 4 rows are fewer than 4 ranks"
    assert reasons == {"fewer than 8 rows", *([few] if world == 4 else [])}  # and nothing was left undecided


def test_the_rows_of_a_chunk_are_scored_once_by_the_group(probe):
    """69 rows in a full top-k layer twice, a source and a consumer, then 18 rows of the tail."""
    for world in (2, 3, 4):
        ranks = probe("0.5.23", f"scenarios:{world}")
        seen = [one["results"]["deep_gemm, ragged, several tiles, full publish"] for one in ranks]
        assert [one["rows"][0] for one in seen] == [4 * 69 + 18] * world
        assert sum(one["rows"][1] for one in seen) == 4 * 69 + 18
        assert {one["fired"] for one in seen} == {5}


def test_one_rank_with_other_picks_or_a_failure_leaves_all_at_stock(probe):
    ranks = probe("0.5.23", "verdicts:2")
    stock = {pick for name in ("wrong", "broken") for one in ranks for pick in one[name]["picks"][:1]}
    assert len(stock) == 1
    for name, rank, reason in (("wrong", 1, "bytes differ"), ("broken", 1, "MemoryError: no room for the logits")):
        for one in ranks:
            assert (one[name]["fired"], set(one[name]["picks"])) == (0, stock), name
            assert one[name]["notes"][1].endswith("did not give the stock selection: 2 calls")
        # Rank 0 prints the report: a failure that another rank alone had must be in its notes, with that rank.
        assert f"rank {rank}: input 0: " in ranks[0][name]["notes"][0]
        assert reason in ranks[0][name]["notes"][0]


def test_an_order_that_stock_does_not_keep_either_is_no_difference(probe):
    ranks = probe("0.5.23", "verdicts:2")
    for one in ranks:
        assert one["unstable"]["fired"] == 2
        assert one["unstable"]["notes"] == ["full_topk from 64 rows, over 16 positions: (36, 33) rows a rank, as stock"]
    # The gathered picks are one order for all ranks, and another in each call.
    first, second = (one["unstable"]["picks"] for one in ranks)
    assert first[1:] == second[1:]
    assert len({*first}) == 3


def test_contexts_without_a_choice_decide_nothing_for_longer_ones(probe):
    for one in probe("0.5.23", "short_first:2"):
        assert one["same"] == [True] * 3
        short, long, counted = one["notes"]
        assert short == "torch_full_topk from 64 rows, nothing to choose: (36, 33) rows a rank, as stock"
        assert long.startswith("torch_full_topk from 64 rows, over 16 positions: stock, rank 0: input 0: ")
        assert counted.endswith("did not give the stock selection: 1 calls")


def test_draft_decode_verify_and_capture_never_enter(probe):
    for one in probe("0.5.23", "never:2"):
        assert one["warm"] == 1
        assert (one["sent"], one["fired"]) == ([], 0)
        assert one["calls"] == {
            "draft": 1,
            "decode, verify or draft extend": 3,
            "graph capture": 1,
            "autotuning": 1,
            "fewer than 8 rows": 1,
            "index heads are not replicated": 1,
        }


# ---------- indexer_chunked ----------


def test_the_budget_knob_reaches_the_tilers_and_changes_no_pick(probe):
    (out,) = probe("0.5.23", "chunked:1")
    (knob, stock) = out["seen"]["deep_gemm"]
    assert (knob[0], knob[2]) == (16, [4096, 1904])
    assert (stock[0], stock[2]) == (2048, [6000])
    assert knob[1] == stock[1]
    (knob, stock) = out["seen"]["torch"]
    assert (knob[0], stock[0]) == (16, 1024)
    assert sum(knob[2]) == sum(stock[2]) == 6000
    assert len(knob[2]) > len(stock[2]) == 3
    assert knob[1] == stock[1]
    state = out["state"]
    assert (state["state"], state["fired"] > 0) == ("native", True)
    assert state["native_flag"].startswith("always on")
    was = "_DEEP_GEMM_SCORE_BUDGET_BYTES 2048 MiB and _TORCH_SCORE_BUDGET_BYTES 1024 MiB"
    assert state["notes"] == [f"a row tile takes up to 16 MiB, not {was}"]


# ---------- hc_fused ----------


def test_every_plan_has_the_bits_of_the_engine_s_kernels(probe):
    """In the interpreter, where the order inside a tile is the interpreter's: whole numbers make it irrelevant, and
    show the order of the slices. tests/gpu/test_hc_fused_gpu.py has the same on a GPU, with random inputs."""
    (out,) = probe("0.5.23", "hc_bits:1")
    assert (out.pop("order shows"), out.pop("tree shows")) == (True, True)
    plans = {"16 rows, 1 stages", "32 rows, 1 stages", "16 rows, 3 stages, wide loads", "32 rows, 3 stages, wide loads"}
    plans.add("32 rows, 4 stages, wide loads")
    for name, seen in out.items():
        assert all(seen.values()), (name, seen)
        wide = {plan for plan in plans if "wide" in plan}
        assert set(seen) == {"random": {"16 rows, 1 stages"}, "tree": wide}.get(name, plans)
    assert len(out) == 7


@pytest.mark.parametrize(("release", "world"), [("0.5.21", 1), ("0.5.22", 1), ("0.5.23", 2)])
def test_sizes_decide_at_their_first_prefill_call_and_nothing_else_enters(probe, release, world):
    ranks = probe(release, f"hc_flow:{world}")
    assert all(one == ranks[0] for one in ranks)
    out = ranks[0]
    assert out["gate"] == 4
    stock, fused = [True, 0], [True, 1]
    assert out["deciding, decided"] == [stock, fused]
    for name in ("too few", "DECODE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "outside a forward (draft stages)"):
        assert out[name] == stock, name
    assert out["capture"] == 0
    # Two rows are below the gate, unless they are this rank's half of four.
    assert out["shard of 2, deciding, decided"] == [stock, fused]
    assert out["2 rows of their own"] == stock
    assert out["no gate"] == stock
    # From 2049 rows on stock has another tile: what was seen at 2048 says nothing of it.
    decides, off = [True, 0], [True, 0]
    assert out["variants"][0] == [decides, fused, decides, off, off]
    assert [note.split(": ")[0] for note in out["variants"][1]] == [
        "from 2048 rows, stock tile 16",
        "off for good at 2048 rows, stock tile 32",
    ]
    why = "the ranks do not run the same rows"
    assert out["off"] == {name: [True, [f"off: {name} is 2: {why}"]] for name in ("attn_dp_size", "attn_cp_size")}
    assert out["notes"] == [
        "from 4 rows, stock tile 8: fused, not timed (16 rows, 1 stages)",
        "from 4 rows (2 on a rank), stock tile 8: fused, not timed (16 rows, 1 stages)",
    ]
    assert out["calls"] == {"too few rows": 3, "no prefill": 4, "graph capture": 1}


def test_a_bit_or_a_failure_on_one_rank_turns_it_off_for_good(probe):
    ranks = probe("0.5.23", "hc_differs:2")
    for name, reason in (("one bit", "of 64 bytes differ"), ("raises", "RuntimeError: no such instruction")):
        for one in ranks:
            same, fired, notes, calls = one[name]
            assert (same, fired, calls) == ([True] * 3, 0, {"differs from stock": 2}), name
            assert len(notes) == 1
            assert notes[0].startswith("off for good at 4 rows, stock tile 8: rank 1: input 0: ")
            assert reason in notes[0]
    # Ranks may run different plans, where both have the stock bits.
    plans = [one["one plan is right"][2][0] for one in ranks]
    assert [one["one plan is right"][:2] for one in ranks] == [[[True] * 3, 1]] * 2
    assert plans[0].endswith("(16 rows, 1 stages)")
    assert plans[1].endswith("(16 rows, 3 stages, wide loads)")
