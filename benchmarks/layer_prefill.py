"""`bench prefill` for tp4_gpu.sh:

PYTHONPATH=. torchrun --nproc-per-node N benchmarks/layer_prefill.py OUT.json [OPTION...]
"""

import os
import sys

from dsv41_dist.cli.app import main

if __name__ == "__main__":
    # 16384 rows of 5120 in bf16 are 160 MiB: room for the sums of the largest chunk over peer.
    os.environ.setdefault("DSV41_PEER_MAX_MIB", "192")
    sys.argv = ["dsv41_dist", "bench", "prefill", "--json", sys.argv[1], *sys.argv[2:]]
    main()
