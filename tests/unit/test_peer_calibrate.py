"""The measured route table: how it follows from times, and that it is refused where it was not made."""

import json

import pytest

from dsv41_dist.comm.calibrate import Calibration, routes_from
from dsv41_dist.comm.errors import ArgumentError
from dsv41_dist.comm.routing import Route, RouteTable

from .test_peer_transport import run


def times(peer, nccl):
    return {"peer": peer, "process_group": nccl}


def test_the_fastest_at_each_size_and_the_fallback_beyond():
    rows = [("all_reduce", 1024, times(3, 8)), ("all_reduce", 4096, times(4, 9)), ("all_reduce", 8192, times(9, 8))]
    rows += [("all_gather", 1024, times(9, 8)), ("all_gather", 4096, times(3, 8)), ("all_gather", 8192, times(4, 9))]
    rows += [("broadcast", 1024, times(9, 8)), ("broadcast", 4096, {"process_group": 8.0})]
    routes = routes_from(rows, "process_group")
    assert routes == (
        Route("all_reduce", 4096, "peer"),
        Route("all_gather", 1024, "process_group"),
        Route("all_gather", 8192, "peer"),
    )
    table = RouteTable("process_group", routes)
    assert table.candidates("all_reduce", 4096)[0] == "peer"
    assert table.candidates("all_reduce", 4097) == ["process_group"]
    assert table.candidates("all_gather", 512)[0] == "process_group"
    assert table.candidates("all_gather", 2048)[0] == "peer"
    assert table.candidates("broadcast", 16) == ["process_group"]


def test_ranks_measure_agree_save_and_load_one_table(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV41_TEST_FOLDER", str(tmp_path))
    results = run("calibrate", 2)
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["routes"] == results[1]["routes"]
    assert results[0]["measured"] == results[1]["measured"] == [["peer", "process_group"]] * 10
    for result in results:
        assert result["loaded"] == result["digest"]
        assert "measured elsewhere (world: '4' there, '2' here)" in result["other_world"]
        assert "the table was edited" in result["edited"]


def test_a_file_that_is_none_is_refused_by_name(tmp_path):
    path = tmp_path / "table.json"
    for text in ("", "[]", "{}", json.dumps({"table": {"routes": [[1]]}})):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=r"table\.json: not a saved calibration"):
            Calibration.load(path, None)
