"""preflight's RoCE section: every host's HCAs, GIDs, MTU, memlock and tools, each alone and then against each other.

Reads files only, so it needs no GPU, no b12x and no RDMA: a folder with the same files stands in for a host
(`DSV41_ROCE_ROOT`, where `{rank}` is replaced).
"""

from __future__ import annotations

import os
import socket

from ..comm import SettingsError
from ..comm.roce_env import HostFacts, RoceSettings, cross_check, read_host
from .checks import Context, Result, check

__all__ = ["roce_check"]


def _wanted(context: Context) -> bool:
    """Where roce would be used: asked for by a rank, or chosen by `auto` for a group of several hosts."""

    def setting(name: str) -> str:
        return os.environ.get(name, "").strip().lower()

    asked = context.transport == "roce" or setting("DSV41_ONESHOT") == "roce" or setting("DSV41_ROCE_ROOT") != ""
    gates = any(setting(name) not in ("", "0") for name in ("DSV41_ROCE_GATHER", "DSV41_ROCE_ALLREDUCE"))
    auto = gates and setting("DSV41_ONESHOT") in ("", "auto")
    said = context.comm.agreement.gather([asked, auto, socket.gethostname()], label="preflight:roce_wanted")
    several = len({host for _, _, host in said}) > 1
    return any(one or (two and several) for one, two, _ in said)


@check("roce", "RoCE: what the hosts have", wanted=_wanted)
def roce_check(context: Context) -> Result:
    """A row for each HCA of each rank; a line for each fault, with host, device, value and fix."""
    ranks = context.ranks
    try:
        facts = read_host(RoceSettings.from_env(rank=ranks.rank), ranks.size)
    except SettingsError as error:
        facts = HostFacts("?", problems=(str(error),))
    gathered = context.comm.agreement.gather(facts.as_json(), label="preflight:roce")
    everyone = [HostFacts.from_json(said) for said in gathered]
    result = Result(columns=["rank", "host", "HCA", "interface", "GID", "address", "subnet", "MTU"])
    for rank, said in enumerate(everyone):
        for number, hca in enumerate(said.hcas):
            cells = [f"{number}: {hca.name}", hca.netdev, str(said.gid_index), hca.ip, hca.subnet, str(hca.mtu)]
            result.rows.append([str(rank), said.host, *cells])
        if not said.hcas:
            result.rows.append([str(rank), said.host, "none", "", "", "", "", ""])
    result.reasons = cross_check(everyone)
    result.data = {"roce": gathered}
    return result
