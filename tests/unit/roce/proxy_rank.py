"""One rank of test_c_proxy: the real C proxy of a b12x wheel, and this process in the kernel's place.

    python -m tests.unit.roce.proxy_rank LIBRARY RANK WORLD HCAS FOLDER SLOT BYTES,BYTES,..

Prints one JSON line: collectives done, elements that were wrong, and the error that ended it, if one did."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np

U64, POINTER = ctypes.c_uint64, ctypes.c_void_p
WAIT_S = 3.0
START_S = 60.0


class Rank:
    def __init__(self, library: str, rank: int, world: int, hcas: int, folder: Path, slot: int) -> None:
        self.lib = lib = ctypes.CDLL(library)
        self.rank, self.world, self.hcas, self.folder, self.slot = rank, world, hcas, folder, slot
        lib.roce_create.restype = POINTER
        lib.roce_error.restype = ctypes.c_char_p
        lib.roce_blob_bytes.restype = lib.roce_stat.restype = U64
        lib.sim_load.restype = ctypes.c_uint32
        lib.sim_load.argtypes, lib.sim_store.argtypes = [POINTER], [POINTER, ctypes.c_uint32]
        layout = (U64 * 7)()
        assert lib.roce_layout(world, U64(slot), layout) == 0
        self.recv, self.flag, self.send, self.ctrl, total, self.stride, _ = map(int, layout)
        self.region = np.frombuffer(mmap.mmap(-1, total), dtype=np.uint8)
        self.base = self.region.ctypes.data
        names, error = (ctypes.c_char_p * 2)(b"sim0", b"sim1"), ctypes.create_string_buffer(512)
        made = lib.roce_create(
            world, rank, names, hcas, 3, 0, POINTER(self.base), U64(total), U64(slot), error, U64(512)
        )
        if not made:
            raise RuntimeError(error.value.decode())
        self.context = POINTER(made)
        self.seq = 0

    def connect(self) -> None:
        size = int(self.lib.roce_blob_bytes())
        blob = ctypes.create_string_buffer(size)
        assert self.lib.roce_local_blob(self.context, blob, U64(size)) == 0
        blobs = b"".join(self.exchange("blob", blob.raw))
        assert self.lib.roce_connect(self.context, blobs, U64(len(blobs))) == 0
        assert self.lib.roce_start(self.context) == 0
        self.exchange("started", b"x")

    def exchange(self, what: str, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, through files that appear whole."""
        partial = self.folder / f".{what}_{self.rank}"
        partial.write_bytes(mine)
        partial.rename(self.folder / f"{what}_{self.rank}")
        paths = [self.folder / f"{what}_{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + START_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} of every rank within {START_S:g} s")
            time.sleep(0.002)
        return [path.read_bytes() for path in paths]

    def gather(self, data: np.ndarray) -> list[np.ndarray]:
        """The protocol of the wheel's kernels: stage, sizes, doorbell, wait for every stripe's flag."""
        seq, n = self.seq + 1, data.size
        slot = seq & 1
        at = self.send + slot * self.slot
        self.region[at : at + n] = data
        for offset in (4, 16 + 4 * slot):
            self.lib.sim_store(self.base + self.ctrl + offset, n)
        self.lib.sim_store(self.base + self.ctrl, seq)
        deadline = time.monotonic() + WAIT_S
        for peer in (p for p in range(self.world) if p != self.rank):
            for hca in range(self.hcas):
                flag = self.base + self.flag + ((peer * 2 + slot) * self.hcas + hca) * self.stride
                while self.lib.sim_load(flag) != seq:
                    if time.monotonic() > deadline or self.lib.roce_failed(self.context):
                        said = (self.lib.roce_error(self.context) or b"").decode()
                        raise TimeoutError(
                            f"waiting for rank {peer}, HCA {hca}, at sequence {seq}; proxy: {said or 'ok'}"
                        )
                    time.sleep(0)
        self.seq = seq
        starts = [self.recv + (source * 2 + slot) * self.slot for source in range(self.world)]
        return [data if s == self.rank else self.region[a : a + n].copy() for s, a in enumerate(starts)]


def main() -> None:
    library, folder = sys.argv[1], Path(sys.argv[5])
    rank, world, hcas, slot = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[6])
    out = {"done": 0, "wrong": 0, "error": ""}
    os.environ.update(SIM_FOLDER=str(folder), SIM_RANK=str(rank))
    try:
        me = Rank(library, rank, world, hcas, folder, slot)
        me.connect()
        for step, n in enumerate(map(int, sys.argv[7].split(","))):
            shards = [np.random.default_rng(100 * step + r).integers(0, 256, n, dtype=np.uint8) for r in range(world)]
            for got, want in zip(me.gather(shards[rank]), shards, strict=True):
                out["wrong"] += int((got != want).sum())
            out["done"] += 1
        me.exchange("finished", b"x")
        out["posted"] = int(me.lib.roce_stat(me.context, 0))
        me.lib.roce_destroy(me.context)
    except (RuntimeError, TimeoutError) as error:
        out["error"] = str(error)
    print(json.dumps(out), flush=True)
    os._exit(0)


main()
