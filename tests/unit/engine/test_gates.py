"""The gates: a frozen list, strict values, errors that name everything, a digest that ranks can agree on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv41_dist.engine.gates import GATES, GateError, Gates, markdown
from dsv41_dist.engine.names import any_set

ROOT = Path(__file__).parents[3]

# Adding, renaming or re-typing a variable is a deliberate act: change this list in the same commit.
FROZEN = """
DSV41_SHARED_PAD_K shared_pad_k switch
DSV41_INDEXER_CHUNKED indexer_chunked switch
DSV41_INDEXER_BUDGET_MB indexer_chunked
SPARK_PREFILL_TP_SPLIT spark_prefill_dense switch
SPARK_PREFILL_MIN_ROWS spark_prefill_dense
DSV41_SM12X_DENSE sm12x_dense_candidates switch
DSV41_ENGRAM_PREFETCH engram_prefetch switch
DSV41_ENGRAM_PREFETCH_CHECK engram_prefetch
DSV41_WO_A_W8 wo_a_w8 switch
DSV41_WO_A_W8_MID wo_a_w8
DSV41_WO_A_W8_DROP wo_a_w8
DSV41_DRAFT_TAU draft_tau switch
DSV41_DRAFT_HEAD_FP8 draft_head_fp8 switch
DSV41_DRAFT_HEAD_FP8_IMPL draft_head_fp8
DSV41_DRAFT_HEAD_FP8_MAX_M draft_head_fp8
DSV41_BLOCK_VERIFY block_verify switch
DSV41_FOLDED_FENCE folded_result_fence switch
DSV41_VERIFY_CAP verify_cap switch
DSV41_VERIFY_CAP_LOG verify_cap volatile
DSV41_ROUTER_LIVE router_live switch
DSV41_REPLICATED_SPLIT replicated_split switch
DSV41_REPLICATED_SPLIT_MAX_M replicated_split
DSV41_REPLICATED_SPLIT_WINDOW replicated_split
DSV41_SPLIT_COMPACT_GATHER replicated_split
DSV41_DRAFT_MAIN_PROJ_SPLIT draft_main_proj switch
DSV41_ROCE_GATHER roce_gather switch
DSV41_ROCE_ALLREDUCE roce_gather switch
DSV41_ONESHOT comm
DSV41_MOE_B12X_NEXT moe_b12x_next switch
DSV41_HC_FUSED hc_fused switch
DSV41_HC_FUSED_MIN hc_fused
DSV41_PREFILL_SP prefill_sp switch
DSV41_PREFILL_SP_EXACT prefill_sp
DSV41_PREFILL_SP_MIN_ROWS prefill_sp
DSV41_PREFILL_SP_WKV prefill_sp
DSV41_PREFILL_SP_FP8 prefill_sp
DSV41_PREFILL_SP_DEBUG prefill_sp
DSV41_PREFILL_SP_DEBUG_CHUNKS prefill_sp
DSV41_PREFILL_SP_DEBUG_DUMP prefill_sp volatile
DSV41_L2_PREFETCH l2_prefetch switch
DSV41_L2_PREFETCH_MB l2_prefetch
DSV41_AUTOTUNE_KEEP autotune_keep switch
DSV41_FAST_LOAD fast_load switch
DSV41_FAST_LOAD_TP_SLICE fast_load
DSV41_COMM_INIT_TIMEOUT_S comm
DSV41_COMM_TIMEOUT_S comm
DSV41_COMM_HEARTBEAT_S comm
DSV41_COMM_CHECK comm
DSV41_COMM_LOG comm volatile
DSV41_PEER_MAX_MIB comm
DSV41_ROCE_MAX_MIB comm
DSV41_ROCE_ROOT comm volatile
DSV41_BOOT_TIMEOUT_S boot
DSV41_BOOT_REPORT boot volatile
DSV41_PYTHON launch volatile
DSV41_ENGINE_PYTHON tests volatile
DSV41_REQUIRE_ENGINE tests volatile
"""

GOOD = [
    ("DSV41_FOLDED_FENCE", "on", True),
    ("DSV41_FOLDED_FENCE", "False", False),
    ("DSV41_DRAFT_TAU", "0.8", 0.8),
    ("DSV41_BLOCK_VERIFY", "true", "1"),
    ("DSV41_BLOCK_VERIFY", "Native", "native"),
    ("DSV41_VERIFY_CAP", "off", 0),
    ("DSV41_VERIFY_CAP", "5", 5),
    ("DSV41_VERIFY_CAP", "conf:0.1", [0.1, 0.1, 0.1, 0.1]),
    ("DSV41_VERIFY_CAP", "conf:0,0.25, 0.5,1", [0.0, 0.25, 0.5, 1.0]),
    ("DSV41_REPLICATED_SPLIT", "wqkv_a, engram.wkv", ["wqkv_a", "engram.wkv"]),
    ("DSV41_REPLICATED_SPLIT_MAX_M", "4096", 4096),
    ("DSV41_ROCE_GATHER", "2097152", 2097152),
    ("DSV41_ONESHOT", "PEER", "peer"),
    ("DSV41_PREFILL_SP", "1", "1"),
    ("DSV41_PREFILL_SP", "comm", "comm"),
    ("DSV41_PREFILL_SP_DEBUG", "compare,fp", ["compare", "fp"]),
    ("DSV41_L2_PREFETCH_MB", "6", 6.0),
    ("DSV41_BOOT_REPORT", "/tmp/r.json", "/tmp/r.json"),
    ("DSV41_FOLDED_FENCE", "  ", False),
]

BAD = [
    ("DSV41_FOLDED_FENCE", "2"),
    ("DSV41_FOLDED_FENCE", "yes please"),
    ("DSV41_DRAFT_TAU", "0"),
    ("DSV41_DRAFT_TAU", "nan"),
    ("DSV41_DRAFT_TAU", "inf"),
    ("DSV41_DRAFT_HEAD_FP8_IMPL", "tp8"),
    ("DSV41_DRAFT_HEAD_FP8_MAX_M", "0"),
    ("DSV41_DRAFT_HEAD_FP8_MAX_M", "-1"),
    ("DSV41_DRAFT_HEAD_FP8_MAX_M", "1e2"),
    ("DSV41_VERIFY_CAP", "6"),
    ("DSV41_VERIFY_CAP", "conf:"),
    ("DSV41_VERIFY_CAP", "conf:0.1,0.2"),
    ("DSV41_VERIFY_CAP", "conf:0.1,0.2,0.3,1.1"),
    ("DSV41_VERIFY_CAP", "conf"),
    ("DSV41_REPLICATED_SPLIT", "wqkv_a,,x"),
    ("DSV41_REPLICATED_SPLIT", "a,a"),
    *(("DSV41_REPLICATED_SPLIT", text) for text in ("off", "False", "on", "true", "0", "1", "wqkv_a,off")),
    ("DSV41_ROCE_GATHER", "9" * 5000),
    ("DSV41_ROCE_GATHER", "2MiB"),
    ("DSV41_ROCE_GATHER", str((1 << 30) + 1)),
    ("DSV41_PREFILL_SP", "2"),
    ("DSV41_PREFILL_SP_DEBUG", "compare,all"),
    ("DSV41_BLOCK_VERIFY", "fused"),
]


def test_the_list_is_frozen():
    here = [
        " ".join([g.name, g.owner] + ["switch"] * g.switch + ["volatile"] * g.volatile)
        for g in GATES
    ]  # fmt: skip
    assert here == FROZEN.split("\n")[1:-1]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_good_values(name, text, value):
    got = Gates.from_env({name: text})[name]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(("name", "text"), BAD)
def test_bad_values_name_variable_value_and_what_is_allowed(name, text):
    with pytest.raises(GateError) as caught:
        Gates.from_env({name: text})
    allowed = next(g.kind.allowed for g in GATES if g.name == name)
    assert str(caught.value) == f"{name}={text!r}: allowed is {allowed}"


def test_unknown_names_get_the_nearest_known_one_and_all_errors_come_at_once():
    with pytest.raises(GateError) as caught:
        Gates.from_env(
            {"DSV41_FOLDED_FENCES": "1", "SPARK_PREFILL_TPSPLIT": "1", "DSV41_DRAFT_TAU": "-1", "OTHER": "x"}
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "DSV41_FOLDED_FENCE" in lines[1].split("nearest")[1]
    assert "SPARK_PREFILL_TP_SPLIT" in lines[2].split("nearest")[1]


def test_every_switch_is_off_by_default_and_on_with_another_value():
    assert Gates.from_env({}).owners_on() == []
    on = {
        "DSV41_DRAFT_TAU": "0.8",
        "DSV41_VERIFY_CAP": "3",
        "DSV41_REPLICATED_SPLIT": "wqkv_a",
        "DSV41_ROCE_GATHER": "1024",
        "DSV41_ROCE_ALLREDUCE": "1024",
    }
    for gate in GATES:
        if gate.switch:
            assert Gates.from_env({gate.name: on.get(gate.name, "1")}).owners_on() == [gate.owner], gate.name
            assert Gates.from_env({gate.name: "" if gate.default == [] else str(gate.default)}).owners_on() == []


def test_the_digest_sees_every_shared_value_and_no_volatile_one():
    stock = Gates.from_env({}).digest()
    assert (
        Gates.from_env({"DSV41_BOOT_REPORT": "/a", "DSV41_COMM_LOG": "/b", "DSV41_VERIFY_CAP_LOG": "/c"}).digest()
        == stock
    )
    assert Gates.from_env({"DSV41_FOLDED_FENCE": "0"}).digest() == stock
    seen = {stock}
    for env in (
        {"DSV41_FOLDED_FENCE": "1"},
        {"DSV41_COMM_CHECK": "1"},
        {"DSV41_COMM_TIMEOUT_S": "7"},
        {"DSV41_PREFILL_SP": "comm"},
    ):
        seen.add(Gates.from_env(env).digest())
    assert len(seen) == 5
    assert Gates.from_env({"DSV41_DRAFT_TAU": "0.80"}).digest() == Gates.from_env({"DSV41_DRAFT_TAU": "8e-1"}).digest()


def test_comm_reads_its_own_variables_with_the_same_defaults_and_bounds():
    from dsv41_dist.comm.errors import SettingsError
    from dsv41_dist.comm.settings import CommSettings

    gates = Gates.from_env({})
    stock = CommSettings.from_env({})
    pairs = {"INIT_TIMEOUT_S": stock.init_timeout_s, "TIMEOUT_S": stock.timeout_s, "HEARTBEAT_S": stock.heartbeat_s}
    for tail, value in pairs.items():
        assert gates[f"DSV41_COMM_{tail}"] == value
        kind = next(g.kind for g in GATES if g.name == f"DSV41_COMM_{tail}")
        for text in (str(kind.low), str(kind.high), str(kind.low / 2), str(kind.high * 2), "x", "nan"):
            # A heartbeat also has to fit both bounds, which is a test of its own.
            env = {"DSV41_COMM_TIMEOUT_S": "86400", "DSV41_COMM_INIT_TIMEOUT_S": "86400", f"DSV41_COMM_{tail}": text}
            try:
                Gates.from_env(env)
            except GateError:
                with pytest.raises(SettingsError):
                    CommSettings.from_env(env)
            else:
                CommSettings.from_env(env)


@given(st.sampled_from([g.name for g in GATES]), st.text(max_size=20).filter(lambda text: "\0" not in text))
def test_any_text_is_a_value_or_a_gate_error(name, text):
    try:
        said = Gates.from_env({name: text}).digest()
    except GateError as error:
        said = str(error)
    assert len(said) == 16 or said.startswith(f"{name}=")


def test_any_set_looks_at_names_only():
    assert not any_set({"PATH": "/bin", "SGLANG_OPT_DSV41_DSPARK_POST_FOLD": "1", "DSV41_FOLDED_FENCE": ""})
    assert any_set({"DSV41_TYPO": "1"})
    assert any_set({"SPARK_PREFILL_TP_SPLIT": "0"})


def test_the_docs_page_is_generated_from_the_table():
    assert (ROOT / "docs" / "gates.md").read_text() == markdown()


def test_importing_the_gates_imports_no_torch():
    code = "import sys, dsv41_dist.engine.gates; sys.exit(any(m in ('torch', 'numpy', 'sglang') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode == 0
