"""`bench prefill` for tp4_gpu.sh: torchrun --nproc-per-node N benchmarks/layer_prefill.py OUT.json [OPTION...]"""

import sys

from dsv41_dist.cli.app import main

if __name__ == "__main__":
    sys.argv = ["dsv41_dist", "bench", "prefill", "--json", sys.argv[1], *sys.argv[2:]]
    main()
