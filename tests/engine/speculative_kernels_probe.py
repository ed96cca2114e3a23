"""Run by the engine's interpreter, which has triton: every kernel case. Prints JSON."""

from __future__ import annotations

import itertools
import json

from tests.unit.speculative import kernel_cases as cases

print(
    json.dumps(
        {
            "block": sum(cases.block_case(*case) for case in itertools.product(cases.KINDS, cases.GAMMAS)),
            "live": sum(cases.live_case(gamma) for gamma in (1, 2, 5)),
            "copy": sum(cases.copy_case(*case) for case in cases.COPIES),
        }
    )
)
