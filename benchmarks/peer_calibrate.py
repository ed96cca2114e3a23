"""Measure, print and save this machine's route table:

PYTHONPATH=. torchrun --nproc-per-node N benchmarks/peer_calibrate.py OUT
"""

import sys
import time

import torch.distributed as dist
from peer_common import size_name, start

from dsv41_dist.comm.calibrate import Calibration, calibrate

ranks, comm = start()
began = time.monotonic()
made = calibrate(comm, label="calibrate")
took = time.monotonic() - began
if ranks.rank == 0:
    made.save(sys.argv[1])
    for route in made.table.routes:
        assert route.max_bytes is not None
        print(f"{route.op:19} up to {size_name(route.max_bytes):>8}: {route.transport}")
    loaded = Calibration.load(sys.argv[1], comm)
    print(f"everything else: {loaded.table.fallback}; digest {loaded.table.digest()}, measured in {took:.1f} s")
comm.close()
dist.destroy_process_group()
