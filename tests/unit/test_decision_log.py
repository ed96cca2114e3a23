"""Comparing decision logs: also those of a rank that died, and those that cannot be compared."""

import json

import pytest

from dsv41_dist.comm import ArgumentError, first_difference


def write(folder, rank, *labels, group="0-1.comm0", end="\n"):
    lines = [json.dumps({"t": rank, "rank": rank, "seq": i, "op": "barrier", "label": x}) for i, x in enumerate(labels)]
    (folder / f"{group}.rank{rank}.jsonl").write_text("\n".join(lines) + end)


def cut(folder, rank, line):
    """Leave only half of a line, the last one or one in the middle."""
    file = folder / f"0-1.comm0.rank{rank}.jsonl"
    lines = file.read_text().splitlines()
    lines[line] = lines[line][: len(lines[line]) // 2]
    file.write_text("\n".join(lines))


def test_a_last_line_that_was_cut_is_the_end_of_that_log(tmp_path):
    write(tmp_path, 0, "one", "two", "three")
    write(tmp_path, 1, "one", "two", "three")
    cut(tmp_path, 1, -1)
    found = first_difference(str(tmp_path))
    assert found["index"] == 2
    assert found["said"][0]["label"] == "three"
    assert found["said"][1] is None
    cut(tmp_path, 0, -1)
    assert first_difference(str(tmp_path)) is None


@pytest.mark.parametrize("text", ["{", "5", "\x00"])
def test_another_line_that_cannot_be_read_is_named(text, tmp_path):
    write(tmp_path, 0, "one", "two")
    write(tmp_path, 1, "one", "two")
    file = tmp_path / "0-1.comm0.rank1.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n\n{text}\n{second}\n")
    with pytest.raises(ArgumentError, match=r"rank1\.jsonl': line 3 is no entry of a decision log; "):
        first_difference(str(tmp_path))


def test_logs_that_are_missing_are_said(tmp_path):
    write(tmp_path, 0, "one")
    with pytest.raises(ArgumentError, match=r"0-1\.comm0: there is a log of rank 0 alone"):
        first_difference(str(tmp_path))
    write(tmp_path, 3, "one")
    with pytest.raises(ArgumentError, match=r"0-1\.comm0: the logs of ranks 1, 2 are missing"):
        first_difference(str(tmp_path))
    write(tmp_path, 1, "one")
    write(tmp_path, 2, "one")
    assert first_difference(str(tmp_path)) is None
    # A difference is said first, in whatever group it is.
    write(tmp_path, 1, "one", group="0")
    write(tmp_path, 3, "other")
    assert first_difference(str(tmp_path))["group"] == "0-1.comm0"


def test_a_file_that_is_no_rank_s_is_named(tmp_path):
    write(tmp_path, 0, "one")
    write(tmp_path, "x", "one", group="a")
    with pytest.raises(ArgumentError, match=r"a\.rankx\.jsonl': allowed is GROUP\.rank<N>\.jsonl"):
        first_difference(str(tmp_path))
