"""The published engine itself. Each boot takes a minute or so; results are kept (fixture.py)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from dsv41_dist.rehearsal.run import boot_engine
from dsv41_dist.rehearsal.settings import Stage, default_stages
from dsv41_dist.rehearsal.verdict import compare

FLIP = str(Path(__file__).with_name("flip"))
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
    outcome = rehearsals.stock(tp=1, stages=(Stage("one changed token", tuple(variants), 12),))
    first, *others = tokens(outcome)
    assert all(other != first for other in others), (first, others)


def test_one_flipped_bit_is_found(rehearsals):
    stock, wrong = rehearsals.stock(tp=2), rehearsals.stock(tp=2, extra_path=(FLIP,))
    found = compare(stock, wrong)
    assert not found.logits_equal
    assert any("logits bytes differ first at forward 11" in problem for problem in found.problems)


def test_an_engine_file_that_was_changed_is_refused_and_nothing_is_left_running(rehearsals, tmp_path):
    where = "import sglang, pathlib; print(pathlib.Path(sglang.__file__).parent)"
    done = subprocess.run([rehearsals.python, "-c", where], capture_output=True, text=True, timeout=120, check=True)
    tree = tmp_path / "tree"
    shutil.copytree(done.stdout.strip(), tree / "sglang", symlinks=True)
    file = tree / "sglang/srt/speculative/dspark_components/dspark_verify.py"
    text = file.read_text()
    old = "            return self.verify_epilogue.read_accept(bs)\n"
    assert text.count(old) == 1
    file.write_text(text.replace(old, old.replace("(bs)", "(bs + 0)")))
    outcome = boot_engine(
        rehearsals.python, rehearsals.boot(tp=2, gates=FENCE, tree=str(tree), speculative=True), "adapted"
    )
    assert "dsv41_dist refuses to go on" in outcome.problem, outcome.log
    assert "TargetVerifyExecutor.accept_and_finalize" in outcome.problem
    assert outcome.stages == []
