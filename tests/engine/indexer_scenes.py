"""Scenes of prefill_adapters_probe.py: the rows of the real indexer's prefill selection over gloo ranks."""

from __future__ import annotations

import hashlib
import importlib
import sys
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention import deepseek_v4_backend as backend
from sglang.srt.layers.attention.dsv4 import v41_indexer
from sglang.srt.model_executor import model_runner  # noqa: F401  (a patched module: it must import)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from dsv41_dist.adapters import spark_prefill_dense as adapter
from tests.engine import indexer_fakes as fakes
from tests.engine.indexer_fakes import BLOCK, PAGE, RATIO, TOPK, TOPK_BLOCKS, Batch, Indexer
from tests.engine.split_ranks import bits, runner, state_of

for name in ("scoring", "dense_blocks", "sparse_table", "full_topk", "types"):
    importlib.import_module(f"{v41_indexer.__name__}.{name}")
OLD = not hasattr(v41_indexer.types.PrefillInputs, "reset_outputs")  # 0.5.21: the buffers are an argument

BATCHES = {
    "ragged": Batch([17, 40, 3, 9], [301, 100, 512, 10]),
    "empty requests": Batch([17, 0, 40, 0, 3], [600, 100, 181, 1, 18]),
    "one request": Batch([70], [1000]),
    "from the first token": Batch([24, 24], [96, 24]),
    "nothing visible yet": Batch([1, 20, 1], [1, 40, 1]),
}
BUDGETS = {"smallest tile": 1, "single tile": 1 << 30, "several tiles": 1 << 14}
# Deciding calls of every size, with choices on every rank: over all published blocks, and within them.
CHOICES = [Batch([rows], [tokens]) for tokens in (1000, 96) for rows in (13, 20, 40, 70)]
EVERY_BUDGET = ("ragged", "empty requests")  # the other batches: several tiles


class Backend:
    """What the real `_low_ratio_index_topk` reads of its DeepseekV4AttnBackend."""

    is_draft_runner = False
    tail_forward_metadata = None
    _low_ratio_index_topk = backend.DeepseekV4AttnBackend._low_ratio_index_topk
    _publish_candidate_metadata = backend.DeepseekV4AttnBackend._publish_candidate_metadata

    def __init__(self, scheme: str, batch: Batch) -> None:
        pool, deep_gemm = fakes.Pool(), scheme != "torch"
        both = {"token_to_kv_pool": pool, "req_to_token": batch.req_to_token}
        self.full_topk_indexer = v41_indexer.FullTopKIndexer(
            **both, use_deep_gemm_prefill=deep_gemm, use_deep_gemm_decode=True
        )
        sizes = {"candidate_topk_blocks": TOPK_BLOCKS, "candidate_block_size": BLOCK}
        if scheme == "table":
            if "req_to_token" not in v41_indexer.sparse_table.SparseTableBackend.__init__.__annotations__:
                del both["req_to_token"]
            table = v41_indexer.sparse_table.SparseTableBackend(**both, page_size=PAGE * RATIO, **sizes)
            self.prefill_candidates = table
        else:
            dense = v41_indexer.dense_blocks.DenseBlocksBackend
            self.prefill_candidates = dense(**both, **sizes, use_deep_gemm_prefill=deep_gemm)
        self.decode_candidates = SimpleNamespace(publish_decode=lambda *a: None)
        self.forward_metadata = SimpleNamespace(candidate_metadata=None)
        self.batch = batch

    def _make_low_ratio_decode_indexer_inputs(self, *a):
        return None

    def _get_low_ratio_selection(self, ratio):
        return self.out

    def _make_low_ratio_prefill_indexer_inputs(self, layer, x, q_lora, req, pos, forward_batch, rows):
        batch = forward_batch.batch
        fields = {
            "indexer": layer.indexer, "layer_id": 3, "compress_ratio": RATIO, "freqs_cis": torch.zeros(2048, 1),
            "x": x, "q_lora": q_lora, "positions": pos, "req_rows": req,
            "req_pool_indices": torch.arange(len(batch.rows)), "kv_page_table": batch.page_table,
            "seq_lens_cpu": batch.lens, "rows_per_request": batch.rows,
            "rows_per_request_device": torch.tensor(batch.rows, dtype=torch.int32), "index_plans": None,
            "out_raw_indices": self.out.raw_indices, "out_page_indices": self.out.page_indices,
        }  # fmt: skip
        known = v41_indexer.types.PrefillInputs.__struct_fields__
        if "k_slots" in known:
            fields["k_slots"] = v41_indexer.scoring.prefill_k_slots(
                req_to_token=batch.req_to_token,
                req_pool_indices=fields["req_pool_indices"],
                seq_lens_cpu=batch.lens,
                ratio=RATIO,
            )
        return v41_indexer.types.PrefillInputs(**{name: fields[name] for name in fields if name in known})

    def select(self, batch: Batch, source=False, consumer=False, pages=True, mode=ForwardMode.EXTEND) -> bytes:
        """One layer's selection; the bytes of both buffers (padded rows included) and of what it published."""
        rows = len(batch.pos) + 3
        buffers = [torch.full((rows, TOPK), 77, dtype=torch.int32) for _ in range(2)]
        raw, page = buffers[0], buffers[1] if pages else None
        if OLD:
            self.out = v41_indexer.types.Selection(page_indices=buffers[1], raw_indices=raw if pages else None)
        else:
            self.out = SimpleNamespace(raw_indices=raw, page_indices=page)
        layer = SimpleNamespace(indexer=Indexer(source, consumer), compress_ratio=RATIO)
        forward = SimpleNamespace(forward_mode=mode, batch=batch)
        if source:
            self.forward_metadata.candidate_metadata = None
        self._low_ratio_index_topk(layer, batch.x, batch.q_lora, batch.req, batch.pos, forward)
        return b"".join([*map(bits, buffers), told(self.forward_metadata.candidate_metadata)])


def told(published) -> bytes:
    """Every tensor and list of a published structure; blocks of a dense one are compared as they are."""
    if published is None:
        return b"nothing"
    parts = []
    for name in published.__struct_fields__:
        value = getattr(published, name)
        parts.append(name.encode() + (bits(value) if isinstance(value, torch.Tensor) else repr(value).encode()))
    return b"|".join(part for part in parts if not part.startswith(b"ready"))


def flow(scheme: str, batch: Batch, tail: str) -> list[str]:
    """Digests of a full top-k layer, a source and two consumers, one of them on the tail's rows."""
    one = Backend(scheme, batch)
    late = batch.tail(5)
    whole = late if tail == "tail-only publish" else batch
    out = [one.select(batch), one.select(batch, pages=False), one.select(whole, source=True)]
    out.append(one.select(whole, consumer=True))
    published = one.forward_metadata.candidate_metadata
    if tail == "full publish" and published is not None and sum(late.rows) >= 8:
        one.forward_metadata.candidate_metadata = published.tail(late.rows)
        out.append(one.select(late, consumer=True))
    return [hashlib.sha256(part).hexdigest()[:16] for part in out]


def budget(nbytes: int) -> None:
    v41_indexer.scoring._DEEP_GEMM_SCORE_BUDGET_BYTES = v41_indexer.scoring._TORCH_SCORE_BUDGET_BYTES = nbytes


def attached(args):
    """A fresh runtime, as after loading a model, and its state."""
    adapter._rows = None
    state = state_of("spark_prefill_dense")
    state.notes.clear()
    adapter.attach(runner(args, torch.nn.Module()), state)
    return state


def scenarios(rank, args):
    """Each flow without the adapter's runtime, then twice with it: the deciding calls and the decided ones."""
    fakes.install(v41_indexer)
    out = {}
    for scheme in ("deep_gemm", "torch", "table"):
        stock, state = {}, None
        for turn in ("stock", "deciding", "decided"):
            if turn == "stock":
                adapter._rows = None
                budget(1 << 14)
                chosen = [flow(scheme, batch, "full publish") for batch in CHOICES]
            elif turn == "deciding":
                state = attached(args)
                budget(1 << 14)
                if [flow(scheme, batch, "full publish") for batch in CHOICES] != chosen:
                    raise AssertionError(f"a deciding call is not stock: {scheme}")
            for name, batch in BATCHES.items():
                for size, nbytes in BUDGETS.items():
                    if name not in EVERY_BUDGET and size != "several tiles":
                        continue
                    budget(nbytes)
                    for tail in ("full publish", "tail-only publish"):
                        key = f"{scheme}, {name}, {size}, {tail}"
                        fakes.scored.clear()
                        fired = state.fired if state else 0
                        got = flow(scheme, batch, tail)
                        if turn == "stock":
                            stock[key] = got, sum(fakes.scored)
                        elif turn == "decided":
                            same = [a == b for a, b in zip(got, stock[key][0], strict=True)]
                            out[key] = {
                                "same": same,
                                "fired": state.fired - fired,
                                "rows": [stock[key][1], sum(fakes.scored)],
                            }
                        elif got != stock[key][0]:
                            raise AssertionError(f"a deciding call is not stock: {key}")
        out[f"{scheme} calls"] = dict(adapter._rows.stock_calls)
    return {"results": out}


def verdicts(rank, args):
    """One rank's kernel picks otherwise, or fails; a top-k that never gives its picks in the same order."""
    fakes.install(v41_indexer)
    budget(1 << 30)
    batch, out = BATCHES["ragged"], {}
    kernel = sys.modules["deep_gemm"].fp8_fp4_mqa_logits

    def wrong(*args, **more):
        logits = kernel(*args, **more)
        return -logits if len(logits) < len(batch.pos) else logits

    def broken(*args, **more):
        if args[0][0].shape[0] < len(batch.pos):
            raise MemoryError("no room for the logits")
        return kernel(*args, **more)

    for name, fake, stable in (("wrong", wrong, True), ("broken", broken, True), ("unstable", kernel, False)):
        state = attached(args)
        fakes.order["stable"] = stable
        sys.modules["deep_gemm"].fp8_fp4_mqa_logits = fake if rank == 1 else kernel
        before = state.fired
        got = [hashlib.sha256(Backend("deep_gemm", batch).select(batch)).hexdigest()[:8] for _ in range(3)]
        out[name] = {"fired": state.fired - before, "notes": list(state.notes), "picks": got}
    fakes.order["stable"] = True
    sys.modules["deep_gemm"].fp8_fp4_mqa_logits = kernel
    return out


def short_first(rank, args):
    """Rank 1's scores are wrong in its slice only: contexts in which every position is picked come first."""
    fakes.install(v41_indexer)
    budget(1 << 30)
    long, short = BATCHES["ragged"], Batch([17, 17, 17, 18], [17, 17, 17, 18])
    adapter._rows = None
    want = [hashlib.sha256(Backend("torch", batch).select(batch)).hexdigest()[:8] for batch in (short, long)]
    state, real = attached(args), Indexer.scores

    def wrong(self, q, k, w):
        rows = adapter._window.rows
        cut = rows is not None and rows.stop - rows.start < len(long.pos)
        return -real(self, q, k, w) if cut else real(self, q, k, w)

    if rank == 1:
        Indexer.scores = wrong
    picks = [hashlib.sha256(Backend("torch", batch).select(batch)).hexdigest()[:8] for batch in (short, long, long)]
    Indexer.scores = real
    return {"same": [picks[0] == want[0], picks[1] == want[1], picks[2] == want[1]], "notes": state.notes}


def never(rank, args):
    """Draft runners, decode, verify, draft extend, capture, autotuning, too few rows: counted, and nothing is sent."""
    fakes.install(v41_indexer)
    state = attached(args)
    batch, sent = BATCHES["ragged"], []
    gather = adapter._rows.comm.all_gather_rows
    adapter._rows.comm.all_gather_rows = lambda *a, **k: sent.append(k["label"]) or gather(*a, **k)
    Backend("deep_gemm", batch).select(batch)
    warm, sent[:] = len(sent), []
    one = Backend("deep_gemm", batch)
    one.is_draft_runner = True
    one.select(batch)
    one = Backend("deep_gemm", batch)
    one.full_topk_indexer = SimpleNamespace(topk_decode=lambda *a: None, topk_prefill=lambda *a: None)
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        one.select(batch, mode=mode)
    from sglang.srt.layers import logits_processor

    capturing, tuning = torch.cuda.is_current_stream_capturing, logits_processor.get_in_autotune_dummy_run
    torch.cuda.is_current_stream_capturing = lambda: True
    on_gpu = Batch(batch.rows, batch.lens)
    on_gpu.x = on_gpu.x.as_subclass(OnGpu)
    Backend("deep_gemm", on_gpu).select(on_gpu)
    torch.cuda.is_current_stream_capturing = capturing
    logits_processor.get_in_autotune_dummy_run = lambda: True
    Backend("deep_gemm", batch).select(batch)
    logits_processor.get_in_autotune_dummy_run = tuning
    few = Batch([4, 3], [40, 30])
    Backend("deep_gemm", few).select(few)
    heads, Indexer.n_local_heads = Indexer.n_local_heads, 8
    Backend("deep_gemm", batch).select(batch)
    Indexer.n_local_heads = heads
    # The 0.5.23 prefill graph's breaks come past the layer: stock.
    one = Backend("deep_gemm", batch)
    one.out = SimpleNamespace(**{f"{n}_indices": torch.zeros(72, TOPK, dtype=torch.int32) for n in ("raw", "page")})
    if not OLD:
        layer = SimpleNamespace(indexer=Indexer(False, False), compress_ratio=RATIO)
        inputs = one._make_low_ratio_prefill_indexer_inputs(
            layer, batch.x, batch.q_lora, batch.req, batch.pos, SimpleNamespace(batch=batch), None
        )
        one.full_topk_indexer.topk_prefill(inputs)
    return {"warm": warm, "sent": sent, "calls": adapter._rows.stock_calls, "fired": state.fired}


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def chunked(rank, args):
    """The budget knob reaches the real tilers: rows a launch under it and under the engine's own, and the picks."""
    fakes.install(v41_indexer)
    adapter._rows = None
    scoring, batch = v41_indexer.scoring, Batch([2000, 2000, 2000], [2000, 2000, 2000])
    names = ("_DEEP_GEMM_SCORE_BUDGET_BYTES", "_TORCH_SCORE_BUDGET_BYTES")
    knob, out = {name: getattr(scoring, name) for name in names}, {}
    for budgets in (knob, dict(zip(names, (2 << 30, 1 << 30), strict=True))):
        vars(scoring).update(budgets)
        for scheme in ("deep_gemm", "torch"):
            fakes.scored.clear()
            picks = hashlib.sha256(Backend(scheme, batch).select(batch)).hexdigest()[:16]
            out.setdefault(scheme, []).append([budgets[names[scheme == "torch"]] >> 20, picks, list(fakes.scored)])
    return {"seen": out, "state": state_of("indexer_chunked").as_json()}
