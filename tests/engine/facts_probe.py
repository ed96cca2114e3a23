"""Run by the engine's interpreter: what read_facts makes of the engine's real configuration. Prints JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

from dsv41_dist.adapters._speculative_modes import read_facts

RELEASE, ON = sys.argv[1], sys.argv[2] == "on"


class Router(torch.nn.Module):
    """A MoE layer as the check sees it."""

    def __init__(self, layer_id: int, output_format: str, vision: bool) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.topk = SimpleNamespace(topk_config=SimpleNamespace(output_format=SimpleNamespace(name=output_format)))
        self.gate = SimpleNamespace(e_score_correction_bias_vl=torch.zeros(1) if vision else None)


def main() -> None:
    wanted = {
        "enable_torch_compile": True,
        "speculative_use_block_verification": True,
        "enable_nvidia_megakernel": True,
    }
    extra = {name: value for name, value in wanted.items() if ON and name in ServerArgs.__struct_fields__}
    publish(
        ServerArgs(model_path="dummy", tp_size=1, device="cpu", **extra),
        role="test",
        ranks=SpawnRanks(world_rank=0, gpu_id=0),
    )
    routers = [Router(3, "BYPASSED", False), Router(4, "BYPASSED", True), Router(5, "TRITON_KERNEL", False)]
    model = torch.nn.ModuleList([*(routers if ON else []), Router(0, "STANDARD", False)])
    worker = SimpleNamespace(
        _verify_planner=SimpleNamespace(mode_value="static"),
        verify_num_draft_tokens=6,
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        _tp_sync=SimpleNamespace(enabled=lambda site: False),
        _rejection_noise=object() if ON else None,
        _sampling_accept_graph=object() if ON else None,
    )
    facts = read_facts(worker, RELEASE)._asdict()
    del facts["gates"]
    print(json.dumps(facts))


main()
