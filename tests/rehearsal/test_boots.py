"""The published engine itself. Each boot takes a minute or so; results are kept (fixture.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dsv41_dist.adapters import REGISTRY, Guarantee
from dsv41_dist.cli.rehearse import engine_tree
from dsv41_dist.engine.gates import Gates
from dsv41_dist.rehearsal.gate_sets import cannot_fire, every_gate
from dsv41_dist.rehearsal.report import judge, text
from dsv41_dist.rehearsal.run import boot_engine
from dsv41_dist.rehearsal.settings import Stage, default_stages
from dsv41_dist.rehearsal.verdict import compare
from tests.unit.roce import fake_host

from .fixture import Sessions

PLUGINS = Path(__file__).with_name("plugins")
FENCE = {"DSV41_FOLDED_FENCE": "1"}


def tokens(outcome) -> list[list[int]]:
    assert outcome.problem == "", outcome.log
    return [answer for stage in outcome.stages for answer in stage["tokens"]]


def test_a_gate_leaves_every_byte_as_it_was_and_is_installed_on_all_ranks(rehearsals):
    stock, adapted = rehearsals.stock(speculative=True), rehearsals.adapted(FENCE, speculative=True)
    assert adapted.problem == "", adapted.log
    assert compare(stock, adapted).problems == []
    assert adapted.boot_report["ranks"] == 4
    (entry,) = adapted.boot_report["adapters"]
    assert (entry["adapter"], len(entry["patched"])) == ("folded_result_fence", 3)


def test_long_prompts_are_chunked_and_a_known_prefix_is_not_computed_again(rehearsals):
    stock = rehearsals.stock(stages=default_stages())
    assert stock.problem == "", stock.log
    assert [sum(stage["cached"]) for stage in stock.stages] == [0, 0, 512]
    rows = [entry["rows"] for entry in stock.ranks[0] if entry["mode"] == "EXTEND"]
    assert rows[10:] == [256, 256, 88, 68]
    # Four ranks, and each gathered the same logits.
    assert sorted(stock.ranks) == [0, 1, 2, 3]
    assert compare(stock, stock).problems == []


def test_drafts_are_accepted_and_the_text_is_that_of_the_target(rehearsals):
    plain = rehearsals.stock(tp=2, order_free=True)
    drafted = rehearsals.stock(tp=2, order_free=True, speculative=True)
    assert tokens(drafted) == tokens(plain)
    steps = [entry["requests"] for entry in drafted.ranks[0] if entry["mode"] == "TARGET_VERIFY" and not entry["draft"]]
    single = [entry["requests"] for entry in plain.ranks[0] if entry["mode"] == "DECODE"]
    # Steps of single requests: fewer, because some drafts were right.
    assert 0 < sum(steps) < sum(single)


def test_tensor_parallel_sizes_give_the_same_tokens_where_the_order_of_sums_does_not_matter(rehearsals):
    runs = {tp: tokens(rehearsals.stock(tp=tp, order_free=True)) for tp in (1, 2, 4)}
    assert len(runs[1]) == 10
    assert runs[1] == runs[2] == runs[4]
    # The reason to make sums order-free: without, bf16 rounding of partial sums alone changes the text.
    assert tokens(rehearsals.stock(tp=1)) != tokens(rehearsals.stock(tp=2))


def test_two_seeds_give_different_text(rehearsals):
    one, two = tokens(rehearsals.stock(tp=1)), tokens(rehearsals.stock(tp=1, seed=2))
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_any_changed_token_of_the_prompt_changes_the_text(rehearsals):
    base = tuple((7 * i * i + 11 * i) % 1000 + 5 for i in range(160))
    variants = [base]
    for position in (0, 1, 7, 40, 90, 125, 158):
        variants.append((*base[:position], base[position] + 1, *base[position + 1 :]))
    outcome = rehearsals.stock(tp=1, stages=(Stage("one changed token", tuple(variants), 24),))
    first, *others = tokens(outcome)
    assert all(other != first for other in others), (first, others)


@pytest.mark.parametrize("layer", range(6))
def test_every_layer_and_every_ranks_shard_count(rehearsals, tmp_path, layer):
    """One head of one layer asks the opposite question. At TP4 head r is rank r's, and no other's."""
    what = {"tp": 4 if layer < 4 else 1, "stages": (Stage("three", default_stages(long=False)[0].prompts[4:7], 24),)}
    head = layer % 4
    rows = range(512 * head, 512 * (head + 1))
    other = rehearsals.with_flipped(tmp_path / "flipped", f"layers.{layer}.attn.wq_b.weight", rows)
    before, after = tokens(rehearsals.stock(**what)), tokens(rehearsals.stock(**what, checkpoint=other))
    assert all(a != b for a, b in zip(before, after, strict=True)), (before, after)


def test_one_flipped_bit_is_not_ready(rehearsals):
    # The second step in which all ten prompts decode.
    what = {"extra_path": (str(PLUGINS / "flip"),), "extra_env": {"REHEARSAL_FLIP": "10 2"}}
    stock, wrong = rehearsals.stock(tp=2), rehearsals.stock(tp=2, **what)
    found = compare(stock, wrong)
    assert not found.logits_equal
    assert any("logits bytes differ first at forward 11" in problem for problem in found.problems)
    problems, _ = judge([stock, wrong], found, [], False)
    assert text([stock, wrong], found, problems, [], "", 0.0).splitlines()[-1].startswith("NOT READY")


def test_bit_identical_adapters_leave_every_byte_and_fire_on_every_rank(rehearsals):
    names = [a.name for a in REGISTRY if a.guarantee == Guarantee.BIT_IDENTICAL and a.name != "router_live"]
    gates = every_gate(names)
    stages = default_stages()
    stock, adapted = rehearsals.stock(stages=stages), rehearsals.adapted(gates, stages=stages)
    assert adapted.problem == "", adapted.log
    assert compare(stock, adapted).problems == []
    fires = [name for name in names if name in adapted.fired and not cannot_fire(name)]
    assert {"replicated_split", "roce_gather"} <= set(fires)
    never = [name for name in fires if not all(adapted.fired[name])]
    natives = [entry["adapter"] for entry in adapted.boot_report["adapters"] if entry["state"] == "native"]
    assert set(never) <= set(natives), adapted.fired
    # The engine ends its ranks with SIGKILL: what the report has was written while they ran.
    assert next(e["fired"] for e in adapted.boot_report["adapters"] if e["adapter"] == "roce_gather") > 1


def test_gathers_over_the_contract_double_of_roce_leave_every_byte(rehearsals, tmp_path):
    for rank in range(4):
        fake_host.host(tmp_path / f"host{rank}", rank)
    gates = {"DSV41_ROCE_GATHER": "4096", "DSV41_ONESHOT": "roce", "DSV41_ROCE_ROOT": str(tmp_path / "host{rank}")}
    stock, adapted = rehearsals.stock(), rehearsals.adapted(gates, extra_path=(str(PLUGINS / "double"),))
    assert adapted.problem == "", adapted.log
    assert compare(stock, adapted).problems == []
    assert len(adapted.fired["roce_gather"]) == 4
    assert all(adapted.fired["roce_gather"])
    (note,) = adapted.boot_report["adapters"][0]["notes"]
    assert re.search(r"over roce: all_gather to 4096 bytes; all_gather over roce >= \d+ calls", note), note


SPECULATIVE = (
    {"DSV41_DRAFT_TAU": "0.8"},
    {"DSV41_BLOCK_VERIFY": "1"},
    {"DSV41_BLOCK_VERIFY": "native"},
    {"DSV41_VERIFY_CAP": "2"},
    {"DSV41_VERIFY_CAP": "conf:0.5"},
    {"DSV41_VERIFY_CAP": "conf:0.5", "DSV41_ROUTER_LIVE": "1"},
    {"DSV41_DRAFT_MAIN_PROJ_SPLIT": "1"},
    {"DSV41_DRAFT_TAU": "0.8", "DSV41_BLOCK_VERIFY": "1", "DSV41_VERIFY_CAP": "conf:0.5", "DSV41_ROUTER_LIVE": "1"},
)


@pytest.mark.parametrize("gates", SPECULATIVE, ids=" ".join)
def test_greedy_text_is_the_same_with_every_speculative_gate(rehearsals, gates):
    what = {"tp": 2, "speculative": True, "order_free": True, "stages": default_stages(long=False, sampled=True)}
    stock, adapted = rehearsals.stock(**what), rehearsals.adapted(gates, **what)
    assert adapted.problem == "", adapted.log
    assert compare(stock, adapted, exact=False).problems == []
    # All of them are switched on by these gates, and none of them is the engine's own here.
    assert sorted(adapted.fired) == sorted(Gates.from_env(gates).owners_on())
    assert all(all(counts) for counts in adapted.fired.values()), adapted.fired


def test_over_http_the_answers_are_those_of_the_offline_engine(rehearsals):
    offline, served = rehearsals.stock(tp=2), rehearsals.stock(tp=2, http=True)
    assert served.problem == "", served.log
    assert compare(offline, served).problems == []


@pytest.mark.parametrize("release", ["0.5.21", "0.5.22"])
def test_other_releases_serve_and_take_the_adapters(rehearsals, release):
    what = {"tp": 2, "speculative": True, "order_free": True, "tree": engine_tree(release)}
    what["stages"] = default_stages(long=False, sampled=True)
    gates = every_gate(a.name for a in REGISTRY)
    stock, adapted = rehearsals.stock(**what), rehearsals.adapted(gates, **what)
    assert adapted.problem == "", adapted.log
    assert stock.version == adapted.version == release
    found = compare(stock, adapted, exact=False)
    assert judge([stock, adapted], found, Gates.from_env(gates).owners_on(), must_fire=False)[0] == []
    # The others have nothing to do with prompts as short as these, or on CPU processes.
    fires = {"draft_tau", "block_verify", "verify_cap", "router_live", "replicated_split", "draft_main_proj"}
    assert fires | {"roce_gather"} <= {name for name, counts in adapted.fired.items() if all(counts)}, adapted.fired


def test_one_rank_with_a_changed_engine_file_is_refused_by_all_four_and_nothing_is_left(rehearsals, tmp_path):
    where = "import sglang, pathlib; print(pathlib.Path(sglang.__file__).parent)"
    done = subprocess.run([rehearsals.python, "-c", where], capture_output=True, text=True, timeout=120, check=True)
    tree = tmp_path / "tree"
    shutil.copytree(done.stdout.strip(), tree / "sglang", symlinks=True, copy_function=os.link)
    file = tree / "sglang/srt/speculative/dspark_components/dspark_verify.py"
    changed = file.read_text()
    old = "            return self.verify_epilogue.read_accept(bs)\n"
    assert changed.count(old) == 1
    file.unlink()  # a link
    file.write_text(changed.replace(old, old.replace("(bs)", "(bs + 0)")))
    with Sessions() as sessions:
        env = {"REHEARSED_BY": sessions.mark, "REHEARSAL_OTHER_RANK": "2", "REHEARSAL_OTHER_TREE": str(tree)}
        boot = rehearsals.boot(gates=FENCE, speculative=True, extra_path=(str(PLUGINS / "one_rank"),), extra_env=env)
        outcome = boot_engine(rehearsals.python, boot, "adapted", timeout_s=600, folder=tmp_path / "boot")
        assert sessions.alive() == []
    assert "dsv41_dist refuses to go on" in outcome.problem, outcome.log
    assert "TargetVerifyExecutor.accept_and_finalize" in outcome.problem
    assert "rank 2: drift: folded_result_fence: drifted" in outcome.problem, outcome.problem
    refusals = (tmp_path / "boot" / "log").read_text().count("dsv41_dist refuses to go on")
    assert refusals == 4  # every rank says the same paragraph
    assert outcome.stages == []
