"""`bench split`, `prefill` and `verify` as a user meets them: real processes, exit codes, one-line errors."""

import json

import pytest

from tests.multirank.commands import cli, mpirun, refused, torchrun

SPLIT = ["bench", "split", "--tokens", "1,6", "--columns", "896", "--hidden", "256", "--draft", "512x64", "-n", "2"]
PREFILL = ["bench", "prefill", "--tokens", "256", "--hidden", "64", "--layers", "1", "-n", "2"]


def test_split_layers_have_the_bytes_of_whole_ones_and_the_break_even_is_said(tmp_path):
    results, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = cli(*SPLIT, "--ranks", "4", "--json", results, "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes()[:4] == b"\x89PNG"
    content = json.loads(results.read_text())
    rows = [row for row in content["rows"] if row["layer"] == "linear"]
    assert rows[0]["sizes"] == [256, 256, 256, 128]
    assert [(row["m"], row["what"]) for row in rows] == [
        (m, what) for m in (1, 6) for what in ("whole", "split, padded gather", "split, compact gather")
    ]
    assert all(row["wrong"] == 0 for row in content["rows"] if "whole_over_this" in row)
    assert {row["verdict"] for row in rows if "verdict" in row} <= {"padded", "compact", "stock"}
    needed = {"op", "bytes", "dtype", "transport", "graph", "p50_us", "p99_us", "cv", "slowest_rank", "algbw_gbps"}
    assert all(needed <= set(row) for row in content["rows"])
    draft = [row for row in content["rows"] if row["layer"] == "draft main_proj"]
    assert {row["what"] for row in draft} >= {"split", "bf16 linear, all columns on each rank"}
    assert done.stdout.count("# break-even, ") == len(content["break_even"])
    assert "wrong 0 OK" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("launch", [torchrun, mpirun], ids=["torchrun", "mpirun"])
def test_split_under_a_launcher(launch):
    done = launch(2, "-m", "dsv41_dist", *SPLIT, "--json", "-")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["env"]["world_size"] == 2
    carrier = "mpi" if launch is mpirun else "process_group"
    assert {row["transport"] for row in content["rows"] if "whole_over_this" in row} == {carrier}


@pytest.mark.parametrize("arguments", [SPLIT, PREFILL], ids=["split", "prefill"])
def test_one_flipped_byte_on_the_wire_is_exit_1(arguments):
    done = cli(*arguments, "--ranks", "2", "--flip-byte", "1", "--json", "-")
    assert done.returncode == 1, done.stderr
    assert sum(row.get("wrong") or 0 for row in json.loads(done.stdout)["rows"]) > 0


def test_exact_has_the_bytes_of_stock_and_sends_what_it_must(tmp_path):
    results, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = cli(*PREFILL, "--ranks", "4", "--json", results, "--plot", plot)
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.read_bytes()[:4] == b"\x89PNG"
    rows = json.loads(results.read_text())["rows"]
    by_mode = {row["mode"]: row for row in rows if row["op"] == "prefill"}
    assert list(by_mode) == ["stock", "comm", "fast", "exact"]
    assert by_mode["exact"]["differing"] == by_mode["exact"]["wrong"] == by_mode["stock"]["differing"] == 0
    assert by_mode["fast"]["wrong"] == 0
    assert by_mode["fast"]["relative_difference"] < 0.05
    # One layer: two sums of [256, 64] bf16 over a ring of four.
    whole = 256 * 64 * 2
    assert by_mode["stock"]["calls"] == {"all_reduce": 2}
    assert by_mode["stock"]["sent_bytes"] == by_mode["comm"]["sent_bytes"] == 2 * 2 * whole * 3 // 4
    assert by_mode["fast"]["calls"] == {"all_gather": 3, "reduce_scatter": 2}
    assert by_mode["fast"]["sent_bytes"] == 5 * whole * 3 // 4
    assert by_mode["exact"]["calls"] == {"all_gather": 3, "all_reduce": 2}
    assert by_mode["exact"]["sent_bytes"] == 7 * whole * 3 // 4
    (parts,) = [row for row in rows if row["op"] == "prefill parts"]
    assert parts["row_work_ratio"] == pytest.approx(parts["row_work_us"] / parts["row_work_shard_us"], abs=1e-3)
    assert set(parts["routes"].values()) == {"process_group"}
    assert parts["engram_ratio"] == pytest.approx(parts["engram_us"] / parts["engram_shard_us"], abs=1e-3)
    assert parts["engram_differing"] >= 0


def test_verify_of_a_real_process(tmp_path):
    results = tmp_path / "out.json"
    arguments = ["bench", "verify", "--pairs", "1", "--temperature", "1", "--agreement", "0.8", "--device", "cpu"]
    done = cli(*arguments, "--json", results)
    assert done.returncode == 0, done.stderr
    assert {row["wrong"] for row in json.loads(results.read_text())["rows"]} == {0}
    assert "wrong 0 OK" in done.stdout.splitlines()[-1]
    assert cli(*arguments, "--drawn-at", "0.5").returncode == 1


BAD = {
    "columns that do not split": (["split", "--columns", "100"], "--columns 100: cannot split 100 columns in tiles"),
    "too few tiles": (["split", "--columns", "256"], "2 tiles are fewer than 4 ranks"),
    "two inputs": (["split", "--hidden", "64,128"], "--hidden '64,128': allowed is one number"),
    "a draft of words": (["split", "--draft", "wide"], "--draft 'wide': allowed is none, or WIDTHxINPUTS"),
    "a draft that has no groups": (["split", "--draft", "512x100"], "inputs in multiples of 32"),
    "a draft that does not split": (["split", "--draft", "128x64"], "--draft '128x64': cannot split 128 columns"),
    "no rows": (["split", "--tokens", "0"], "--tokens '0': allowed is an integer from 1"),
    "a type without a layer": (["split", "-d", "int8"], "--dtype 'int8': allowed is all, bfloat16"),
    "graphs without a GPU": (["split", "-G", "3", "--device", "cpu"], "-G '3': CUDA graphs need a GPU"),
    "no such rank": (["split", "--flip-byte", "4"], "--flip-byte '4': allowed is an integer from 0 to 3"),
    "a flip that nobody looks for": (["split", "--flip-byte", "1", "-c", "0"], "--flip-byte '1' with -c 0"),
    "rows that do not split": (
        ["prefill", "--tokens", "200"],
        "--tokens 200: allowed over 4 ranks are multiples of 256",
    ),
    "no such mode": (["prefill", "--modes", "fast,slow"], "--modes 'slow': allowed is exact, fast, comm"),
    "a narrow layer": (["prefill", "--hidden", "100"], "--hidden '100': allowed is one multiple of 64"),
    "ranks without heads": (["prefill", "--ranks", "3", "--tokens", "384"], "--ranks 3: 3 ranks: 8 groups of heads"),
    "no layers": (["prefill", "--layers", "0"], "--layers '0': allowed is an integer from 1 to 43"),
    "no folder": (["prefill", "--json", "/no/such/x.json"], "--json '/no/such/x.json': its folder"),
    "too many paths": (["verify", "--vocab", "64"], "--vocab 64 with --drafts 5: 1073741824 paths, allowed is 131072"),
    "too cold": (["verify", "--temperature", "0"], "--temperature '0': allowed is a number from 0.05 to 10"),
    "not a number": (["verify", "--agreement", "nan"], "--agreement 'nan': allowed is a number from 0 to 1"),
    "a cap of words": (["verify", "--caps", "3 wide"], "--caps 'wide': allowed is 1..5, conf:t or conf:a,b,c,d"),
    "a cap above the drafts": (["verify", "--drafts", "2", "--caps", "3"], "--caps '3': allowed is"),
    "no pairs": (["verify", "--pairs", "0"], "--pairs '0': allowed is an integer from 1"),
    "plot of another kind": (["verify", "--plot", "x.gif"], "--plot 'x.gif': allowed is a file name"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_2(name, monkeypatch, capsys):
    arguments, text = BAD[name]
    refused(["bench", *arguments], text, monkeypatch, capsys)


def test_verify_is_one_process():
    done = torchrun(2, "-m", "dsv41_dist", "bench", "verify")
    assert done.returncode != 0
    assert "bench verify is one process; torchrun has started 2" in done.stderr
