"""Run by the engine's interpreter: drives the real accept classes for two steps and says, for each path, whether the
first step's results share memory with the epilogue's buffers and whether the second step changed them. Prints JSON."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import torch
from sglang.srt.speculative.dspark_components import dspark_verify, dspark_worker_v2
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult
from sglang.srt.speculative.spec_tp_sync import SpecTpSync

BS, MAX_BS, STRIDE, VOCAB = 3, 4, 6, 32
FIELDS = ("correct_len", "bonus", "cap_trim_lens", "commit_lens", "new_seq_lens", "out_tokens")


def step_inputs(seed: int) -> dict[str, torch.Tensor]:
    """Candidates of which request r has (r + seed) % STRIDE accepted drafts, and logits that say so."""
    gen = torch.Generator().manual_seed(seed)
    candidates = torch.randint(0, VOCAB, (BS, STRIDE), generator=gen)
    logits = torch.randn(BS, STRIDE, VOCAB, generator=gen)
    for request in range(BS):
        for row in range(STRIDE - 1):
            right = row < (request + seed) % STRIDE
            token = candidates[request, row + 1] if right else (candidates[request, row + 1] + 1) % VOCAB
            logits[request, row, token] = 50.0
    return {
        "candidates": candidates,
        "logits": logits.view(BS * STRIDE, VOCAB),
        "seq_lens": torch.tensor([10, 20, 30]) + 100 * seed,
    }


def make_epilogue():
    sync = SpecTpSync(SimpleNamespace(world_size=1, rank_in_group=0))
    return dspark_verify.DsparkVerifyEpilogue(
        max_bs=MAX_BS, verify_num_draft_tokens=STRIDE, device="cpu", tp_sync=sync
    ), sync


def make_executor(epilogue, sync):
    config = SimpleNamespace(hf_text_config=SimpleNamespace(model_type="deepseek_v41"))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
    executor = dspark_verify.TargetVerifyExecutor(
        target_worker=worker,
        gamma=STRIDE - 1,
        verify_num_draft_tokens=STRIDE,
        model_runner=worker.model_runner,
        kv_injector=None,
        tp_sync=sync,
        verify_epilogue=epilogue,
    )
    # The split-vocab argmax is a CUDA kernel; torch.argmax decides the same here.
    for name in ("_fused_argmax", "_target_is_dsv41"):
        if hasattr(executor, name):
            setattr(executor, name, False)
    return executor


def draft_block(inputs):
    fields = {
        "draft_tokens": inputs["candidates"][:, 1:],
        "corrected_logits": None,
        "greedy_mask": torch.ones(BS, dtype=torch.bool),
        "temperatures": torch.ones(BS),
        "greedy_draft": False,
    }
    return DraftBlockResult(**{name: fields[name] for name in DraftBlockResult.__struct_fields__ if name in fields})


def accept(executor, inputs, folded: bool):
    return executor.accept_and_finalize(
        folded_accept=folded,
        bs=BS,
        verify_ids_2d=inputs["candidates"],
        target_logits=inputs["logits"],
        draft_block=draft_block(inputs),
        sampling_info=None,
        draft_input=None,
        layout=None,
        prefix_lens=inputs["seq_lens"],
        draft_tokens=inputs["candidates"][:, 1:].contiguous(),
    )


def graph_step(epilogue, inputs) -> None:
    """What the verify graph does on replay: the real in-graph accept, into the persistent buffers."""
    epilogue._accept(
        candidates=inputs["candidates"],
        logits=inputs["logits"],
        draft_tokens=inputs["candidates"][:, 1:].contiguous(),
        seq_lens=inputs["seq_lens"],
    )


def storages(epilogue) -> set[int]:
    return {v.untyped_storage().data_ptr() for v in vars(epilogue).values() if isinstance(v, torch.Tensor)}


def judge(epilogue, outs: dict[str, torch.Tensor], next_step) -> dict:
    before = {name: tensor.clone() for name, tensor in outs.items()}
    shared = sorted(n for n, t in outs.items() if t.untyped_storage().data_ptr() in storages(epilogue))
    next_step()
    for value in vars(epilogue).values():
        if isinstance(value, torch.Tensor):
            value.fill_(-7)  # also what the next step happened to leave equal
    return {
        "shared": shared,
        "changed": sorted(name for name, tensor in outs.items() if not torch.equal(tensor, before[name])),
        "values": {name: tensor.tolist() for name, tensor in before.items()},
        "dtypes": {name: str(tensor.dtype) for name, tensor in before.items()},
    }


def fields_of(outs) -> dict[str, torch.Tensor]:
    return {name: getattr(outs, name) for name in FIELDS}


def folded_path(paths) -> None:
    epilogue, sync = make_epilogue()
    executor = make_executor(epilogue, sync)
    graph_step(epilogue, step_inputs(1))
    outs = accept(executor, step_inputs(1), folded=True)
    paths["folded"] = judge(epilogue, fields_of(outs), lambda: graph_step(epilogue, step_inputs(2)))
    # The graph must still write the buffers themselves, whatever the fence did to what was read.
    graph_step(epilogue, step_inputs(2))
    wanted = accept(executor, step_inputs(2), folded=False)
    read = epilogue.read_accept(BS)
    assert all(
        torch.equal(getattr(read, name).to(torch.int64), getattr(wanted, name).to(torch.int64)) for name in FIELDS
    )
    assert all(t.untyped_storage().data_ptr() in storages(epilogue) for t in fields_of(read).values())


def eager_path(paths) -> None:
    epilogue, sync = make_epilogue()
    executor = make_executor(epilogue, sync)
    outs = accept(executor, step_inputs(1), folded=False)
    paths["eager"] = judge(epilogue, fields_of(outs), lambda: accept(executor, step_inputs(2), folded=False))


def block_lens_path(paths) -> None:
    if not hasattr(dspark_worker_v2.DSparkWorkerV2, "_block_accept_lens"):
        return
    epilogue, sync = make_epilogue()
    executor = make_executor(epilogue, sync)
    worker = SimpleNamespace(_verify_epilogue=epilogue)
    for folded in (True, False):
        graph_step(epilogue, step_inputs(1))
        outs = accept(executor, step_inputs(1), folded=folded)
        lens = dspark_worker_v2.DSparkWorkerV2._block_accept_lens(worker, accept=outs, folded_accept=folded, bs=BS)
        key = "block lens, folded" if folded else "block lens, eager"
        paths[key] = judge(epilogue, {"block": lens}, lambda: graph_step(epilogue, step_inputs(2)))


def region_path(paths) -> None:
    try:
        from sglang.srt.speculative.dspark_components import dspark_sampling_accept_graph as region_module
    except ImportError:
        return
    epilogue, sync = make_epilogue()
    steps = {seed: step_inputs(seed) for seed in (1, 2)}
    logits = steps[1]["logits"].clone()
    io = dspark_verify.StaticVerifyIO(
        candidates=steps[1]["candidates"].clone(),
        logits=logits,
        hidden=torch.zeros(1),
        seq_lens=steps[1]["seq_lens"].clone(),
        req_pool_indices=torch.arange(BS),
        out_cache_loc=torch.zeros(BS * STRIDE, dtype=torch.int64),
        positions=torch.zeros(BS * STRIDE, dtype=torch.int64),
    )
    epilogue.static_io[BS] = io
    params = SimpleNamespace(
        greedy_mask=torch.zeros(BS, dtype=torch.bool), temperatures=torch.ones(BS), step_temperatures=torch.ones(BS)
    )
    sampler = SimpleNamespace(greedy_draft=False, step_logits=torch.zeros(BS, STRIDE - 1, VOCAB), params=params)
    region = region_module.DsparkSamplingAcceptGraph(
        epilogue=epilogue,
        resolve_draft_sampler=lambda: sampler,
        tp_sync=sync,
        fused_argmax=False,
        block_verification=False,
        device="cpu",
    )

    def run(seed: int):
        # A replay: the static inputs hold this step's values, the accept writes the static buffers.
        io.candidates.copy_(steps[seed]["candidates"])
        io.logits.copy_(steps[seed]["logits"])
        io.seq_lens.copy_(steps[seed]["seq_lens"])
        region._warmed_up.clear()  # so that every call runs the region itself: there is no CUDA graph here
        torch.manual_seed(seed)
        return region.run(bs=BS, target_logits=logits)

    paths["region"] = judge(epilogue, fields_of(run(1)), lambda: run(2))
    region.disabled = True
    assert region.run(bs=BS, target_logits=logits) is None


def main() -> None:
    paths: dict[str, dict] = {}
    folded_path(paths)
    eager_path(paths)
    block_lens_path(paths)
    region_path(paths)
    from dsv41_dist.engine import boot

    report = boot.report()
    print(json.dumps({"paths": paths, "report": report, "gate": os.environ.get("DSV41_FOLDED_FENCE")}))


main()
