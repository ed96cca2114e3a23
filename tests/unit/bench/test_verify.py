"""`bench verify`: its enumeration against the rational oracle, its checks, and its exit code."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import sys
import types
from fractions import Fraction

import pytest
import torch

from dsv41_dist.cli import verify_kernels, verify_laws, verify_router
from dsv41_dist.cli.bench_verify import plan_verify, run_verify
from dsv41_dist.cli.verify_laws import Pair, closed_form, make_pair, outcome, rule_of, verified_drafts
from dsv41_dist.kernels.verify_cap import source_rows
from tests.unit.speculative.exact import Confidence, Model, block_outcome, run, token_outcome


def pair_of(target, draft, vocab: int, drafts: int) -> Pair:
    """A Pair from two functions that give a law for a prefix."""

    def rows(law, depth):
        return [torch.tensor([[float(v) for v in law(x)] for x in itertools.product(range(vocab), repeat=i)],
                             dtype=torch.float64) for i in range(depth)]  # fmt: skip

    levels, laws = rows(target, drafts + 1), rows(draft, drafts)
    paths = torch.tensor(list(itertools.product(range(vocab), repeat=drafts)))
    prefix = [torch.arange(len(paths)) // vocab ** (drafts - i) for i in range(drafts + 1)]
    p = torch.stack([levels[i][prefix[i]] for i in range(drafts + 1)], 1)
    q = torch.stack([laws[i][prefix[i]] for i in range(drafts)], 1)
    return Pair(levels, laws, paths, p, q, q.gather(-1, paths.unsqueeze(-1)).squeeze(-1).prod(-1))


def test_the_example_of_the_block_paper():
    third = [Fraction(1, 3), Fraction(2, 3)]
    pair = pair_of(lambda x: third, lambda x: third[::-1], 2, 2)
    for block, wanted in ((False, 19 / 9), (True, 20 / 9)):
        rule = rule_of(pair, block)
        error, expected = outcome(pair, rule)
        assert error < 1e-15
        assert expected == pytest.approx(wanted, abs=1e-14)
        assert closed_form(pair, rule) == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("seed", range(6))
def test_lengths_and_exactness_are_the_rational_oracle_s(seed):
    vocab, drafts = 3, 3
    rng = random.Random(seed)
    p, q = Model(vocab, rng, zeros=False), Model(vocab, rng, zeros=False)
    cap = Confidence(rng).cap(drafts, ahead=0)
    pair = pair_of(p, q, vocab, drafts)
    lengths = torch.tensor([cap(tuple(x)) for x in pair.paths.tolist()])
    for block, oracle in ((False, token_outcome), (True, block_outcome)):
        for capped in (None, lengths):
            # The product's forms under a cap: a block ends there, a token-wise run is cut there.
            exact, wanted = run(p, q, drafts, oracle, None if capped is None else cap, truncate=not block)
            rule = rule_of(pair, block, capped)
            error, expected = outcome(pair, rule)
            assert exact
            assert error < 1e-14
            assert expected == pytest.approx(float(wanted), abs=1e-12)
            assert closed_form(pair, rule) == pytest.approx(float(wanted), abs=1e-12)


def test_a_cap_that_sees_the_draft_it_caps_is_caught():
    wrong = 0
    for seed in range(6):
        rng = random.Random(seed)
        p, q = Model(3, rng, zeros=False), Model(3, rng, zeros=False)
        pair = pair_of(p, q, 3, 3)
        cap = Confidence(rng).cap(3, ahead=1)
        lengths = torch.tensor([cap(tuple(x)) for x in pair.paths.tolist()])
        wrong += outcome(pair, rule_of(pair, True, lengths))[0] > 1e-3
    assert wrong >= 5


@pytest.mark.parametrize("agreement", [0.0, 0.7, 1.0])
def test_a_pair_is_what_it_says(agreement):
    pair = make_pair(4, 3, agreement, 0.8, 0.9, seed=3)
    assert float(pair.drawn.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(pair.p.sum(-1), torch.ones(64, 4, dtype=torch.float64))
    assert 0 < pair.overlap <= 1
    if agreement == 1.0:
        same = make_pair(4, 3, 1.0, 0.8, 1.0, seed=3)
        assert same.overlap == pytest.approx(1, abs=1e-12)
        assert outcome(same, rule_of(same, True))[1] == pytest.approx(4, abs=1e-12)


def test_the_ideal_confidence_does_not_see_the_draft_that_it_judges():
    pair = make_pair(3, 4, 0.8, 1.0, 1.0, seed=1)
    lengths = verified_drafts(pair, [0.6] * 4)
    assert len(lengths.unique()) >= 3, "a cap that never bites shows nothing"
    by_prefix: dict[tuple[int, tuple[int, ...]], set[bool]] = {}
    for path, length in zip(pair.paths.tolist(), lengths.tolist(), strict=True):
        for j in range(2, 5):
            by_prefix.setdefault((j, tuple(path[: j - 1])), set()).add(length >= j)
    assert all(len(said) == 1 for said in by_prefix.values())
    assert verified_drafts(pair, 2).unique().tolist() == [2]


def tiny(**changes: str | None):
    given: dict[str, str | None] = {
        "vocab": "3", "drafts": "3", "temperatures": "1.0", "agreements": "0.5,0.9", "taus": "0.8",
        "caps": "2 conf:0.6", "pairs": "2", "drawn_at": "1", "device": "cpu", "requests": None, "kernel_vocab": "50",
        "iterations": "1", "graphs": None, "json_file": "-", "plot_file": None,
    }  # fmt: skip
    return plan_verify(**{**given, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", range(1, 6))
def test_the_caps_that_nobody_named_fit_the_drafts(drafts):
    caps = tiny(vocab="2", drafts=str(drafts), caps=None).caps
    assert [text for text, _ in caps] == [str(min(3, drafts)), "conf:0.5"]


def test_a_run_passes_and_every_line_says_what_it_found(capsys):
    assert run_verify(tiny()) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2 * 6
    by_rule = {(row["rule"], row["cap"]): row for row in rows if row["agreement"] == 0.9}
    token, block = by_rule["token", None], by_rule["block", None]
    assert block["tokens"] > token["tokens"]
    assert by_rule["block", "2"]["tokens"] < block["tokens"]
    assert by_rule["block", "2"]["rows"] == 3
    assert 2 <= by_rule["token", "conf:0.6"]["rows"] <= 4
    assert all(row["wrong"] == 0 and row["law_error"] < 1e-12 for row in rows)
    assert all(row["tokens"] == pytest.approx(row["closed_form"], abs=1e-9) for row in rows)


def test_drafts_drawn_at_another_temperature_are_exit_1(capsys):
    assert run_verify(tiny(drawn_at="0.7")) == 1
    assert sum(row["wrong"] for row in json.loads(capsys.readouterr().out)["rows"]) > 0


def test_a_rule_that_accepts_too_much_is_exit_1(monkeypatch, capsys):
    def generous(*args):
        w, h, correction = verify_laws_block(*args)
        return w, (h * 1.01).clamp(max=1), correction

    verify_laws_block = verify_laws.block_laws
    monkeypatch.setattr(verify_laws, "block_laws", generous)
    assert run_verify(tiny()) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["rule"] for row in rows if row["wrong"]} == {"block"}


def test_a_wrong_closed_form_is_exit_1(monkeypatch, capsys):
    monkeypatch.setattr(verify_laws, "closed_form", lambda pair, rule: closed_form(pair, rule) + 1e-6)
    assert run_verify(tiny()) == 1
    assert all(row["wrong"] for row in json.loads(capsys.readouterr().out)["rows"])


def test_kernels_are_timed_and_compared(capsys):
    assert run_verify(tiny(requests="1,3", agreements="0.5")) == 0
    rows = [r for r in json.loads(capsys.readouterr().out)["rows"] if r["op"] == "verify kernel"]
    assert [(row["kernel"], row["requests"]) for row in rows] == [
        (kernel, bs)
        for bs in (1, 3)
        for kernel in ("block_verify", "block_verify, live rows", "live_rows", "copy_rows")
    ]
    assert all(row["p50_us"] > 0 and row["twin_p50_us"] > 0 and row["wrong"] == row["differ"] == 0 for row in rows)
    assert [row["decided"] for row in rows if row["kernel"] == "block_verify"] == [4, 12]


@pytest.mark.parametrize("broken", ["another token", "one draft fewer", "live rows", "a copied row"])
def test_a_kernel_that_decides_otherwise_is_exit_1(broken, monkeypatch, capsys):
    right = verify_kernels.block_verify

    def block(**given):
        verdict = right(**given)
        if broken == "another token":
            return verdict._replace(bonus=(verdict.bonus + 1) % 50)
        return verdict._replace(correct_len=(verdict.correct_len - 1).clamp(min=0))

    if broken in ("another token", "one draft fewer"):
        monkeypatch.setattr(verify_kernels, "block_verify", block)
    elif broken == "live rows":
        monkeypatch.setattr(verify_kernels, "live_rows", lambda confidence, thresholds, out: out.fill_(2))
    else:
        monkeypatch.setattr(verify_kernels, "copy_rows", lambda weights, ids, packed, live, stride: ids.add_(1))
    assert run_verify(tiny(requests="4", agreements="0.5")) == 1
    rows = [r for r in json.loads(capsys.readouterr().out)["rows"] if r["op"] == "verify kernel"]
    hit = {row["kernel"].split(",")[0] for row in rows if row["wrong"]}
    assert hit == {{"live rows": "live_rows", "a copied row": "copy_rows"}.get(broken, "block_verify")}


def twin_way(given, noise, live):
    return tuple(verify_kernels.block_verify_torch(**given, noise=noise, live=live))


def test_the_ways_to_launch_are_timed_and_one_whose_bytes_differ_is_exit_1(monkeypatch, capsys):
    def last_bit(*args):
        tau, bonus, weights, thresholds = twin_way(*args)
        weights[0, -1].view(torch.int32).bitwise_xor_(1)
        return tau, bonus, weights, thresholds

    for four, wrong in ((twin_way, 0), (last_bit, 4)):
        ways = {"one_launch": twin_way, "four_launches": four}
        monkeypatch.setattr(verify_kernels, "_launches", lambda plan, ways=ways: ways)
        assert run_verify(tiny(requests="3", agreements="0.5")) == bool(wrong)
        rows = [r for r in json.loads(capsys.readouterr().out)["rows"] if r["op"] == "verify kernel"]
        for row in rows:
            block = row["kernel"].startswith("block_verify")
            assert row["wrong"] == (wrong if block else 0)
            assert ("one_launch_p50_us" in row, "four_launches_p50_us" in row) == (block, block)
            assert verify_kernels.line_of(row).count(" - ") == (0 if block else 2)


def test_a_near_tie_is_not_wrong_and_a_clear_loser_is():
    """The race of the correction token, in float64."""
    plan = dataclasses.replace(tiny(), kernel_vocab=40)
    given = verify_kernels._requests(plan, 6, 0)
    want = verify_kernels.block_verify_torch(**given, noise=verify_kernels.NoiseState(5, "cpu"))
    assert float(verify_kernels._lead(given, None, 5, want).max()) < 1e-4
    other = want._replace(bonus=(want.bonus + 1) % 40)
    assert float(verify_kernels._lead(given, None, 5, other).min()) > 1e-3


def test_the_plot_is_drawn_with_and_without_kernels(tmp_path, monkeypatch, capsys):
    for requests in (None, "2"):
        file = tmp_path / f"{requests}.svg"
        assert run_verify(tiny(requests=requests, plot_file=str(file))) == 0
        # One <g id="axes_N"> for each panel.
        assert file.read_text().count('<g id="axes_') == (3 if requests is None else 4)
    monkeypatch.setattr(verify_router, "engine_routers", routers_of())
    file = tmp_path / "router.svg"
    assert run_verify(tiny(requests="2", plot_file=str(file))) == 0
    assert file.read_text().count('<g id="axes_') == 5
    capsys.readouterr()


def torch_router(scores, bias, *, packed_out, bias_alt, input_ids, num_token_non_padded, live=None, live_stride=0, **_):
    """The router in plain torch, as far as it is compared; with `live` a dead row reads its anchor's scores."""
    rows = torch.arange(len(scores))
    source = rows if live is None else source_rows(live, live_stride)
    used = (rows < num_token_non_padded).unsqueeze(-1)
    source = torch.where(used.squeeze(-1), source, rows)
    activated = torch.nn.functional.softplus(scores[source]).sqrt()
    chosen = torch.where((input_ids[source] == 3).unsqueeze(-1), bias_alt, bias)
    ids = (activated + chosen).topk(packed_out.shape[1]).indices
    weights = torch.where(used, activated.gather(-1, ids), 0)
    ids = torch.where(used, ids, -1).int()
    packed_out.copy_(ids)
    return weights, ids


def routers_of(live=torch_router):
    return lambda device: verify_router.Routers(torch_router, live, {"release": "torch", "source": "-"})


def router_rows(capsys):
    out = json.loads(capsys.readouterr().out)
    return out["router"], [row for row in out["rows"] if row["op"] == "verify router"]


def test_the_router_is_timed_and_compared_over_64_replays(monkeypatch, capsys):
    monkeypatch.setattr(verify_router, "engine_routers", routers_of())
    assert run_verify(tiny(requests="1,3", agreements="0.5")) == 0
    router, rows = router_rows(capsys)
    assert router == {"release": "torch", "source": "-"}
    assert [(row["requests"], row["rows"], row["half"], row["decided"]) for row in rows] == [
        (1, 4, 2, 256),
        (3, 12, 2, 768),
    ]
    for row in rows:
        assert row["wrong"] == 0
        assert row["moved"] > 64, row
        assert all(row[f"{path}_p50_us"] > 0 for path in ("stock", "copy_all", "copy_half", "live_all", "live_half"))


def off_by_a_bit(*args, **kwargs):
    weights, ids = torch_router(*args, **kwargs)
    return weights.view(torch.int32).bitwise_xor(1).view(torch.float32), ids


def deaf(*args, live, live_stride, **kwargs):
    return torch_router(*args, **kwargs)


@pytest.mark.parametrize("live", [off_by_a_bit, deaf])
def test_a_live_router_that_is_not_stock_and_a_copy_is_exit_1(live, monkeypatch, capsys):
    monkeypatch.setattr(verify_router, "engine_routers", routers_of(live))
    assert run_verify(tiny(requests="2", agreements="0.5")) == 1
    assert [row["wrong"] > 100 for row in router_rows(capsys)[1]] == [True]


def test_a_copy_that_does_nothing_is_exit_1_though_the_live_router_does_nothing_too(monkeypatch, capsys):
    """Equal to each other, but not to the twin, and no row is routed otherwise than stock."""
    monkeypatch.setattr(verify_router, "engine_routers", routers_of(deaf))
    monkeypatch.setattr(verify_router, "copy_rows", lambda *args: None)
    assert run_verify(tiny(requests="2", agreements="0.5")) == 1
    (row,) = router_rows(capsys)[1]
    assert row["moved"] == 0
    assert row["wrong"] > 100


def test_a_router_that_is_not_timed_says_why(monkeypatch, capsys):
    assert run_verify(tiny(agreements="0.5")) == 0
    assert router_rows(capsys) == ({"skipped": "no --requests"}, [])
    assert run_verify(tiny(requests="1", agreements="0.5")) == 0
    assert router_rows(capsys) == (
        {"skipped": "the engine's router is a Triton kernel: it needs a CUDA device"},
        [],
    )
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(verify_router, "engine_routers", lambda device: verify_router.load_routers())
    assert run_verify(tiny(requests="1", agreements="0.5", json_file=None)) == 0
    assert "# router: skipped, sglang.kernels.ops.moe.moe_fused_gate cannot be imported: " in capsys.readouterr().out


def test_an_engine_that_has_drifted_is_skipped_by_name(monkeypatch, tmp_path, capsys):
    file = tmp_path / "moe_fused_gate.py"
    file.write_text("def moe_fused_gate(): ...\n")
    engine, module = types.ModuleType("sglang"), types.ModuleType(verify_router._GATE)
    engine.__version__, module.__file__ = "0.5.99", str(file)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", engine)
    monkeypatch.setitem(sys.modules, verify_router._GATE, module)
    monkeypatch.setattr(verify_router, "engine_routers", lambda device: verify_router.load_routers())
    assert run_verify(tiny(requests="1", agreements="0.5")) == 0
    said = router_rows(capsys)[0]["skipped"]
    assert said.startswith("router_live cannot be made from SGLang 0.5.99: anchor 1 of 8")
