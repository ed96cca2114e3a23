"""Draw a results file of `bench split`, `prefill` or `verify`:

    PYTHONPATH=. python benchmarks/draw_layers.py split|prefill|verify RESULTS.json PLOT.png

For machines without matplotlib: measure there with --json, draw here.
"""

import importlib
import json
import sys
from pathlib import Path

MODULES = {"split": "split_report", "prefill": "prefill_report", "verify": "verify_report"}

if __name__ == "__main__":
    kind, results, plot = sys.argv[1:]
    if kind not in MODULES:
        raise SystemExit(f"kind {kind!r}: allowed is {', '.join(MODULES)}")
    importlib.import_module(f"dsv41_dist.cli.{MODULES[kind]}").draw(json.loads(Path(results).read_text()), plot)
