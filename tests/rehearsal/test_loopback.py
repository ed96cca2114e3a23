"""The loopback stand-in between processes: every operation against comm.reference, byte for byte."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from dsv41_dist.comm import CommSettings, Communicator, Ranks, reference
from dsv41_dist.comm.errors import CommError
from dsv41_dist.rehearsal.stand_ins.loopback import LoopbackTransport


def one_rank(rank: int, world: int, store: str, mute: int, answers) -> None:
    from dsv41_dist.comm.transports import peer

    torch.set_num_threads(1)
    peer.PeerTransport = LoopbackTransport
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    comm = Communicator.create(Ranks.from_torch(), ["peer"], None, CommSettings(timeout_s=3.0, init_timeout_s=30.0))
    said = "equal" if isinstance(comm.transports["peer"], LoopbackTransport) else "another transport"
    generator = torch.Generator().manual_seed(3)
    for step in range(30):
        if rank == mute and step == 5:
            break  # a rank that makes one call less
        dtype = (torch.bfloat16, torch.float16, torch.float32)[step % 3]
        shards = [torch.randn(world * (1 + step), 5, generator=generator).to(dtype) for _ in range(world)]
        x = shards[rank]
        try:
            pairs = [(comm.all_gather(x, step % 2, label="gather"), reference.all_gather(shards, step % 2))]
            pairs.append((comm.all_reduce(x, label="sum"), reference.all_reduce(shards)))
            part = reference.reduce_scatter(shards, rank)
            pairs.append((comm.reduce_scatter(x, label="scatter"), part))
            pairs.append((comm.broadcast(x.clone(), step % world, label="cast"), shards[step % world]))
        except CommError as error:
            said = f"{type(error).__name__}: {error}"
            break
        for got, want in pairs:
            if not torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)):
                said = f"differs at step {step}"
    answers.put((rank, said))
    if mute < 0:
        comm.close()
        dist.destroy_process_group()


def answers_of(tmp_path, world: int, mute: int = -1) -> dict[int, str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "dsv41_dist.comm.create", "dsv41_dist.comm.reference"])
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=one_rank, args=(rank, world, str(tmp_path / "store"), mute, answers), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        return dict(answers.get() for _ in range(world) if not answers.empty())
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("world", [2, 3])
def test_every_operation_has_the_bytes_of_the_reference(tmp_path, world):
    assert answers_of(tmp_path, world) == dict.fromkeys(range(world), "equal")


def test_a_rank_that_does_not_come_ends_the_wait_of_the_others(tmp_path):
    said = answers_of(tmp_path, 3, mute=1)
    assert said[1] == "equal"
    assert all("gather" in said[rank] and said[rank] != "equal" for rank in (0, 2)), said


def test_it_is_for_cpu_tensors():
    assert LoopbackTransport.probe(Ranks(0, 2, torch.device("cpu"), None, None, None)) is None
    reason = LoopbackTransport.probe(Ranks(0, 2, torch.device("meta"), None, None, None))
    assert reason == "the loopback stand-in is for CPU tensors, not meta"
