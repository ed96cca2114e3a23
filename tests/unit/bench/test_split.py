"""`bench split`: the break-even and the options it and `bench prefill` share. The runs are in tests/multirank."""

from __future__ import annotations

import pytest
import torch

from dsv41_dist.cli.layer_run import byte_differences, integers, types
from dsv41_dist.cli.split_report import break_even, draw, lines_of
from dsv41_dist.comm import ArgumentError


def line(n: int, ratio: float | None, m: int = 6, **more):
    row = {"layer": "linear", "n": n, "k": 64, "m": m, "dtype": "bfloat16", "what": "whole", "p50_us": 10.0}
    if ratio is not None:
        row |= {"what": "split, padded gather", "whole_over_this": ratio, "verdict": "padded"}
    return row | more


def test_the_break_even_is_where_the_ratio_crosses_one():
    rows = [line(n, r) for n, r in ((1000, 0.5), (4000, 2.0), (16000, 3.0))] + [line(1000, None)]
    (found,) = break_even(rows)
    assert (found["below"], found["columns"], found["estimate"], found["m"]) == (1000, 4000, 2000, 6)
    assert lines_of([found], rows) == [
        "break-even, split, padded gather, bfloat16, m=6: between 1000 and 4000 columns, about 2000"
    ]


def test_a_width_that_is_slower_again_moves_it_up():
    (found,) = break_even([line(n, r) for n, r in ((1000, 1.5), (2000, 0.9), (4000, 1.1))])
    assert (found["below"], found["columns"]) == (2000, 4000)
    assert 2000 < found["estimate"] < 4000


@pytest.mark.parametrize(("ratios", "text"), [((0.5, 0.9), "above 2000 columns"), ((1.0, 2.0), "at or below 1000")])
def test_outside_of_what_was_measured_it_says_so(ratios, text):
    evens = break_even([line(1000, ratios[0]), line(2000, ratios[1])])
    assert text in lines_of(evens, [])[0]
    assert evens[0]["estimate"] is None


@pytest.mark.parametrize("verdict", ["stock", "mixed"])
def test_layers_that_stayed_whole_are_no_evidence(verdict):
    rows = [line(1000, 0.5), line(2000, 1.0, verdict=verdict), line(4000, 2.0)]
    (found,) = break_even(rows)
    assert (found["below"], found["columns"]) == (1000, 4000)
    assert lines_of([found], rows)[-1].endswith("gave other bits: n=2000 m=6")


def test_the_draft_s_projection_has_no_part_in_it_and_row_counts_are_apart():
    rows = [line(1000, 2.0, m=1), line(1000, 0.5, m=96), line(5120, 2.0, layer="draft main_proj")]
    assert [(e["m"], e["columns"]) for e in break_even(rows)] == [(1, 1000), (96, None)]


def test_the_plot_is_drawn(tmp_path):
    env = {"world_size": 2, "versions": {"torch": "x"}}
    rows = [line(n, r, m=m) for n in (1000, 2000) for r in (None, 1.5) for m in (1, 6)]
    rows.append(line(1000, 1.0, m=96, verdict="stock"))
    draw({"env": env, "rows": rows}, str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").read_text().count('<g id="axes_') == 2


def test_differences_are_counted_by_element_and_by_bytes():
    a = torch.tensor([0.0, 1.0, float("nan"), 4.0])
    b = torch.tensor([-0.0, 1.0, float("nan"), 5.0])
    assert byte_differences(a, b) == 2
    assert byte_differences(a.bfloat16().view(2, 2), a.bfloat16().view(2, 2)) == 0


def test_lists_of_numbers_and_types():
    assert integers("--tokens", "6,1,6", 1, 9) == (1, 6)
    with pytest.raises(ArgumentError, match="--tokens 'x'"):
        integers("--tokens", "1,x", 1, 9)
    assert types("half,float16,float", ("float16", "float32")) == ("float16", "float32")
    assert types("all", ("float16", "float32")) == ("float16", "float32")
    with pytest.raises(ArgumentError, match="--dtype 'int8': allowed is all, float16"):
        types("int8", ("float16",))
