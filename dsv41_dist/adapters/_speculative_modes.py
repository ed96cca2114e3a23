"""Which modes of the engine the speculative adapters work with: one table, checked when the DSpark worker is built.

A row says what happens when an adapter meets another adapter or an engine mode: `allowed`, `forced` (the adapter makes
the pair right) or `refused`. docs/speculative.md shows the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..engine.gates import Gates
from ..engine.refusal import refuse
from .base import AdapterState

__all__ = ["RULES", "WORKER", "Facts", "Rule", "check", "checked_worker_init", "read_facts"]

WORKER = "sglang.srt.speculative.dspark_components.dspark_worker_v2"


class Facts(NamedTuple):
    """What the engine was configured to do, and our own gates."""

    gates: Gates
    release: str
    mode: str = "static"  # SGLANG_RAGGED_VERIFY_MODE
    stride: int = 6  # verify rows of a request: one anchor and stride - 1 drafts
    attn_dp: bool = False
    simulated: bool = False  # SGLANG_SIMULATE_ACC_LEN
    greedy_draft: bool = False  # SGLANG_DSPARK_USE_GREEDY_DRAFT
    block_flag: bool = False  # --speculative-use-block-verification
    blockwise: bool = False  # SGLANG_OPT_DSV41_BLOCKWISE_REJECTION
    region: bool = False  # SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH
    fused_tail: bool = False  # SGLANG_DSPARK_FUSED_ACCEPT_TAIL
    mega_gate: bool = False  # SGLANG_OPT_DEEPGEMM_MEGA_GATE
    mega_moe: bool = False  # --moe-a2a-backend megamoe
    megakernel: bool = False  # --enable-nvidia-megakernel
    torch_compile: bool = False  # --enable-torch-compile
    plan_synced: bool = True  # SGLANG_SPEC_TP_SYNC has dspark-plan, or there is one rank
    escaped_layers: tuple[int, ...] = ()  # target layers whose router is not a gate that is patched


class Rule(NamedTuple):
    """One row. `holds` says whether the other side is there."""

    adapter: str
    other: str
    verdict: str
    why: str
    holds: Callable[[Facts], bool]


def _cap(facts: Facts) -> int | list[float]:
    return facts.gates["DSV41_VERIFY_CAP"]


RULES: tuple[Rule, ...] = (
    Rule(
        "draft_tau",
        "SGLANG_OPT_DSV41_SAMPLING_ACCEPT_GRAPH",
        "forced",
        "the region takes the target's temperature from a buffer of its own, not from the draft's",
        lambda f: f.region,
    ),
    Rule(
        "draft_tau",
        "block_verify, SGLANG_OPT_DSV41_BLOCKWISE_REJECTION",
        "allowed",
        "both test with the temperatures that the draft sampled at",
        lambda f: f.blockwise or f.gates["DSV41_BLOCK_VERIFY"] != "0",
    ),
    Rule(
        "draft_tau",
        "SGLANG_DSPARK_USE_GREEDY_DRAFT",
        "refused",
        "an argmax draft has no temperature to scale",
        lambda f: f.greedy_draft,
    ),
    Rule(
        "block_verify",
        "native before 0.5.22",
        "refused",
        "0.5.21 has no block verification of its own; DSV41_BLOCK_VERIFY=1 brings it",
        lambda f: f.gates["DSV41_BLOCK_VERIFY"] == "native" and f.release == "0.5.21",
    ),
    Rule(
        "block_verify",
        "--speculative-use-block-verification",
        "allowed",
        "with 1 our kernel takes the sampled rows, with native the engine's does, as it would have",
        lambda f: f.block_flag,
    ),
    Rule(
        "block_verify",
        "SGLANG_OPT_DSV41_BLOCKWISE_REJECTION",
        "forced",
        "the token-wise blockwise kernel is not reached: sampled rows are block verified",
        lambda f: f.blockwise,
    ),
    Rule(
        "block_verify",
        "SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept",
        "allowed",
        "ragged verify keeps the stock rule",
        lambda f: f.mode != "static",
    ),
    Rule(
        "block_verify",
        "SGLANG_SIMULATE_ACC_LEN",
        "allowed",
        "a simulated accept is greedy and is left alone",
        lambda f: f.simulated,
    ),
    Rule(
        "block_verify",
        "verify_cap",
        "forced",
        "the block ends at the live length (1), or the raw run is cut there (native): both exact under a causal cap",
        lambda f: bool(_cap(f)),
    ),
    Rule(
        "verify_cap",
        "SGLANG_DSPARK_FUSED_ACCEPT_TAIL",
        "forced",
        "the fused tail knows no cap: it is turned off",
        lambda f: f.fused_tail,
    ),
    Rule(
        "verify_cap",
        "SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept",
        "refused",
        "the engine cuts the verify window itself there",
        lambda f: f.mode != "static",
    ),
    Rule(
        "verify_cap",
        "attention data parallelism",
        "refused",
        "ranks verify different requests, and one live length is broadcast",
        lambda f: f.attn_dp,
    ),
    Rule(
        "verify_cap",
        "SGLANG_SIMULATE_ACC_LEN",
        "refused",
        "a constant simulated length may exceed the cap",
        lambda f: f.simulated,
    ),
    Rule(
        "verify_cap",
        "SGLANG_OPT_DEEPGEMM_MEGA_GATE",
        "refused",
        "that gate routes without moe_fused_gate, so dead rows would stream their own experts",
        lambda f: f.mega_gate,
    ),
    Rule(
        "verify_cap",
        "--moe-a2a-backend megamoe",
        "refused",
        "it may route inside its own kernel",
        lambda f: f.mega_moe,
    ),
    Rule(
        "verify_cap",
        "--enable-nvidia-megakernel",
        "refused",
        "a whole-step kernel passes every hook",
        lambda f: f.megakernel,
    ),
    Rule(
        "verify_cap",
        "--enable-torch-compile",
        "refused",
        "a compiled model would keep the scope it was traced in",
        lambda f: f.torch_compile,
    ),
    Rule(
        "verify_cap",
        "a router inside the MoE kernel (TopKOutputFormat BYPASSED or TRITON_KERNEL)",
        "refused",
        "these target layers never call moe_fused_gate",
        lambda f: bool(f.escaped_layers),
    ),
    Rule(
        "verify_cap",
        "SGLANG_SPEC_TP_SYNC without dspark-plan",
        "refused",
        "ranks that round a confidence differently would route differently",
        lambda f: isinstance(_cap(f), list) and not f.plan_synced,
    ),
    Rule(
        "router_live",
        "no verify_cap",
        "refused",
        "only verify_cap has live lengths to route by; set DSV41_VERIFY_CAP",
        lambda f: not _cap(f),
    ),
)


def check(adapter: str, facts: Facts) -> list[Rule]:
    """The rules of `adapter` that apply, in order of the table. Refuses (SystemExit) at the first refused one."""
    met = [rule for rule in RULES if rule.adapter == adapter and rule.holds(facts)]
    for rule in met:
        if rule.verdict == "refused":
            refuse(
                f"{adapter} does not go with {rule.other}: {rule.why}",
                "Unset one of the two on every rank; docs/speculative.md has the table.",
            )
    if adapter == "verify_cap":
        _check_cap(facts)
    return met


def _check_cap(facts: Facts) -> None:
    """conf has a threshold for each draft after the first, of five; a fixed cap is at most the number of drafts."""
    cap, drafts = _cap(facts), facts.stride - 1
    if (len(cap) != drafts - 1) if isinstance(cap, list) else (cap > drafts):
        refuse(
            f"DSV41_VERIFY_CAP={facts.gates.texts['DSV41_VERIFY_CAP']}: this draft has {drafts} drafts; "
            f"allowed is 1..{min(drafts, 5)} (conf is for 5 drafts)",
            "Set it to one of these on every rank, or unset it.",
        )


def checked_worker_init(original: Any, adapter: str, state: AdapterState, release: str = "") -> Any:
    """`DSparkWorkerV2.__init__`, and then the table for `adapter`. Forced pairs are noted in the boot report."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hosts_draft(self):
            note(adapter, state, read_facts(self, release))

    return __init__


def hosts_draft(worker: Any) -> bool:
    """Whether this worker drafts at all; a pipeline stage that does not has no verify planner."""
    return getattr(worker, "_hosts_draft", True)


def note(adapter: str, state: AdapterState, facts: Facts) -> None:
    """Check `adapter` against `facts` and note what was forced."""
    for rule in check(adapter, facts):
        if rule.verdict == "forced":
            state.notes.append(f"with {rule.other}: {rule.why}")


def read_facts(worker: Any, release: str) -> Facts:
    """Facts of a built DSparkWorkerV2 of `release`; a switch that the release does not have is off."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend
    from sglang.srt.runtime_context import get_exec, get_flags, get_parallel, get_spec
    from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

    def env(name: str) -> bool:
        return bool(getattr(envs, name).get()) if hasattr(envs, name) else False

    backend = get_moe_a2a_backend()
    planner = worker._verify_planner
    return Facts(
        gates=Gates.from_env(),
        release=release,
        mode=planner.mode_value,
        stride=int(worker.verify_num_draft_tokens),
        attn_dp=is_dp_attention_enabled() or bool(getattr(get_parallel(), "attn_dp_enabled", False)),
        simulated=float(envs.SGLANG_SIMULATE_ACC_LEN.get()) > 0,
        greedy_draft=env("SGLANG_DSPARK_USE_GREEDY_DRAFT"),
        block_flag=bool(getattr(get_spec(), "speculative_use_block_verification", False)),
        blockwise=getattr(worker, "_rejection_noise", None) is not None,
        region=getattr(worker, "_sampling_accept_graph", None) is not None,
        fused_tail=env("SGLANG_DSPARK_FUSED_ACCEPT_TAIL"),
        mega_gate=env("SGLANG_OPT_DEEPGEMM_MEGA_GATE"),
        mega_moe=bool(backend.is_megamoe() or backend.is_flashinfer_megamoe()),
        megakernel=bool(getattr(get_exec().kernel, "enable_nvidia_megakernel", False)),
        torch_compile=bool(get_flags().capture.enable_torch_compile),
        plan_synced=get_parallel().tp_size == 1 or worker._tp_sync.enabled(SpecTpSyncSite.DSPARK_PLAN),
        escaped_layers=escaped_layers(worker),
    )


def escaped_layers(worker: Any) -> tuple[int, ...]:
    """Layers of the target whose top-k is left to the MoE kernel, by their configured output format."""
    out: list[int] = []
    for module in worker.target_worker.model_runner.model.modules():
        topk = getattr(module, "topk", None)
        config = getattr(topk, "topk_config", None)
        if config is None or getattr(module, "layer_id", None) is None:
            continue
        # Vision routing replaces the module's own top-k, whatever its format.
        if getattr(getattr(module, "gate", None), "e_score_correction_bias_vl", None) is not None:
            continue
        name = getattr(getattr(config, "output_format", None), "name", None)
        if name in ("BYPASSED", "TRITON_KERNEL"):
            out.append(int(module.layer_id))
    return tuple(out)
