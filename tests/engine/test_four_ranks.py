"""Four gloo ranks with the real modules: all of them adapted, or none left running."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from pathlib import Path

import pytest

from tests.engine.real import HERE, RELEASES, engine_env
from tests.warm import Warm, WarmProcess

WORLD = 4
BOUND_S = 240
VERIFY = "sglang/srt/speculative/dspark_components/dspark_verify.py"
SYMBOL = "sglang.srt.speculative.dspark_components.dspark_verify:TargetVerifyExecutor.accept_and_finalize"
pytestmark = pytest.mark.timeout(BOUND_S + 60)


class Ended:
    """How one rank ended: status, output, and when (seconds since the epoch)."""

    def __init__(self, status: int, out: str, err: str, at: float) -> None:
        self.status, self.out, self.err, self.at = status, out, err, at

    @property
    def paragraph(self) -> str:
        """The refusal as printed, down to the end of what it says to do."""
        text = self.err[self.err.index("dsv41_dist refuses to go on") :]
        end = "shows what drifted."
        return text[: text.index(end) + len(end)]


def start(warm: Warm, trees: list[Path], envs: list[dict[str, str]]) -> list[Ended]:
    """Run the ranks; every one has ended when this returns, killed if need be after BOUND_S."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks: list[WarmProcess] = []
    for rank, (tree, extra) in enumerate(zip(trees, envs, strict=True)):
        where = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = engine_env(tree, **where, **extra)
        ranks.append(warm.start([HERE / "rank_probe.py"], env))
    ended: list[Ended | None] = [None] * WORLD
    deadline = time.time() + BOUND_S
    try:
        while any(one is None for one in ended):
            for rank, process in enumerate(ranks):
                if ended[rank] is None and process.poll() is not None:
                    at = time.time()
                    ended[rank] = Ended(process.wait(0), *process.communicate(), at)
            if time.time() > deadline:
                pytest.fail(f"ranks {[r for r, one in enumerate(ended) if one is None]} still run after {BOUND_S} s")
            time.sleep(0.05)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [one for one in ended if one is not None]


def show_times(ended: list[Ended]) -> None:
    """Reported, not asserted: from the last rank's arrival at the agreement to the end of each rank."""
    arrived = [float(found[1]) for one in ended if (found := re.search(r"agreement at ([\d.]+)", one.err))]
    print("ended after the agreement began:", [round(one.at - max(arrived), 2) for one in ended], "s")


@pytest.fixture
def drifted(published, tmp_path):
    """The published 0.5.23 with one line of one target changed; hard links, so it costs no space."""
    root = tmp_path / "drifted"
    shutil.copytree(published("0.5.23"), root, copy_function=os.link)
    file = root / VERIFY
    text = file.read_text()
    old = "            return self.verify_epilogue.read_accept(bs)\n"
    assert text.count(old) == 1
    file.unlink()
    file.write_text(text.replace(old, old.replace("(bs)", "(bs + 0)")))
    return root


FENCE = {"DSV41_FOLDED_FENCE": "1"}


@pytest.mark.parametrize("release", RELEASES)
def test_all_four_install_and_agree(warm_engine, published, tmp_path, release):
    report = tmp_path / "report.json"
    ended = start(warm_engine, [published(release)] * WORLD, [{**FENCE, "DSV41_BOOT_REPORT": str(report)}] * WORLD)
    assert [one.status for one in ended] == [0] * WORLD, ended[0].err[-3000:]
    seen = [json.loads(one.out.splitlines()[-1]) for one in ended]
    assert [one["ready"] for one in seen] == [True] * WORLD
    assert len({json.dumps(one["report"]["adapters"]) for one in seen}) == 1
    assert seen[0]["report"]["engine_release"] == release
    assert SYMBOL in seen[0]["report"]["adapters"][0]["patched"]
    # The table once, from rank 0; the file says at the end that the adapter never fired here.
    tables = [one.err.count("on SGLang " + release) for one in ended]
    assert tables == [1, 0, 0, 0]
    written = json.loads(report.read_text())
    assert (written["ranks"], written["adapters"][0]["state"]) == (WORLD, "never fired")
    show_times(ended)


def refused_alike(ended: list[Ended], *words: str) -> None:
    assert [one.status for one in ended] == [1] * WORLD, [one.err[-2000:] for one in ended]
    assert len({one.paragraph for one in ended}) == 1, [one.paragraph for one in ended]
    for word in words:
        assert word in ended[0].paragraph, ended[0].paragraph
    show_times(ended)


def test_one_drifted_rank_ends_all_four_by_name(warm_engine, published, drifted):
    trees = [published("0.5.23")] * 3 + [drifted]
    ended = start(warm_engine, trees, [FENCE] * WORLD)
    refused_alike(ended, "rank 3: drift: folded_result_fence: drifted", SYMBOL)


def test_one_rank_with_another_gate_ends_all_four_by_name(warm_engine, published):
    envs = [FENCE, {**FENCE, "DSV41_COMM_CHECK": "1"}, FENCE, FENCE]
    ended = start(warm_engine, [published("0.5.23")] * WORLD, envs)
    refused_alike(ended, "DSV41_COMM_CHECK: ranks 0,2,3 said unset; rank 1 said true")


def test_one_rank_of_another_release_ends_all_four_by_name(warm_engine, published):
    trees = [published("0.5.23")] * 2 + [published("0.5.22")] + [published("0.5.23")]
    ended = start(warm_engine, trees, [FENCE] * WORLD)
    refused_alike(ended, "engine release: ranks 0,1,3 said", "rank 2 said", "0.5.22")


def test_one_rank_that_lost_its_patch_ends_all_four_before_they_are_ready(warm_engine, published):
    envs = [FENCE, FENCE, {**FENCE, "PROBE_SPOIL": "1"}, FENCE]
    ended = start(warm_engine, [published("0.5.23")] * WORLD, envs)
    refused_alike(ended, "rank 2: drift:", SYMBOL, "was replaced after it was patched")


def test_one_rank_without_any_gate_ends_all_four(warm_engine, published):
    bound = {**FENCE, "DSV41_BOOT_TIMEOUT_S": "3"}
    ended = start(warm_engine, [published("0.5.23")] * WORLD, [bound, bound, bound, {}])
    assert all(one.status != 0 for one in ended), [(one.status, one.err[-500:]) for one in ended]
    for one in ended[:3]:
        assert one.status == 1
        assert "missing in" in one.paragraph
        assert "rank 3" in one.paragraph
        assert "without the DSV41_* variables or without a door" in one.paragraph
    show_times(ended)
