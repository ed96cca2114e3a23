"""Run by the engine's interpreter with `scene:ranks` arguments: the scenes of the prefill adapters. Prints JSON.

One process for all scenes of a release, because importing the engine is what takes the time; each scene is forked.
"""

from __future__ import annotations

import json
import sys

from tests.engine.hc_scenes import hc_bits, hc_differs, hc_flow
from tests.engine.indexer_scenes import chunked, never, scenarios, short_first, verdicts
from tests.engine.sm12x_scenes import sm12x
from tests.engine.split_ranks import run_world

SCENES = {
    f.__name__: f for f in (sm12x, scenarios, verdicts, short_first, never, chunked, hc_bits, hc_flow, hc_differs)
}


def main() -> None:
    out = {}
    for asked in sys.argv[1:]:
        name, _, size = asked.partition(":")
        out[asked] = run_world(int(size), SCENES[name])
    print(json.dumps(out))


main()
