"""`bench split` for tp4_gpu.sh:

PYTHONPATH=. torchrun --nproc-per-node N benchmarks/layer_split.py OUT.json [OPTION...]
"""

import sys

from dsv41_dist.cli.app import main

if __name__ == "__main__":
    sys.argv = ["dsv41_dist", "bench", "split", "--json", sys.argv[1], *sys.argv[2:]]
    main()
