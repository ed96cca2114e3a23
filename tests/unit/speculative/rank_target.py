"""What each of four gloo ranks does: start the noise of block_verify as the worker's constructor does, then verify."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from dsv41_dist.adapters.block_verify import _Verifier
from dsv41_dist.cli.session import join
from dsv41_dist.comm import CommSettings, Communicator
from dsv41_dist.engine import boot
from dsv41_dist.engine.agreement import Group
from dsv41_dist.engine.state import AdapterState
from dsv41_dist.kernels.block_verify import block_verify


def start_and_verify(rank: int, size: int, seeds: list[int]) -> dict:
    settings = CommSettings(timeout_s=20.0, init_timeout_s=30.0)
    comm = Communicator.create(join("own", "cpu", "process_group", settings), settings=settings)
    boot._armed = SimpleNamespace(group=Group(comm, rank, size), ready=False)
    verifier = _Verifier(False, AdapterState("block_verify", ""), "0.5.23")
    try:
        verifier.start(seeds[rank], "cpu")
    except SystemExit as refusal:
        return {"refused": str(refusal), "noise": verifier.noise is not None}
    gen = torch.Generator().manual_seed(0)
    said = []
    for _ in range(5):
        verdict = block_verify(
            candidates=torch.randint(0, 50, (4, 4), generator=gen),
            target=torch.randn(16, 50, generator=gen),
            draft_logits=torch.randn(4, 3, 50, generator=gen),
            target_temperatures=torch.ones(4),
            draft_temperatures=torch.ones(4),
            noise=verifier.noise,
        )
        said.append([verdict.correct_len.tolist(), verdict.bonus.tolist()])
    return {"said": said, "state": verifier.noise.state.tolist()}
