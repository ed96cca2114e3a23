"""What a host must have for RoCE, read from files before anything is built: HCAs, GIDs, MTU, memlock, compiler.

b12x's runtime takes what it is given: an HCA list with NCCL's exclude sign becomes an include list, a listed port that
is down fails deep inside the set-up, one GID index serves all HCAs whatever stands at it, and HCA number h of one rank
is paired with number h of every other. Each of these is found here, on its rank, and said in one line: host, device,
value, fix. Nothing here needs RDMA hardware, torch or b12x: a folder with the same files stands in for a host
(`DSV41_ROCE_ROOT`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import SettingsError

__all__ = ["MAX_HCAS", "Hca", "HostFacts", "RoceSettings", "cross_check", "read_host"]

#: b12x keeps the first two of a longer list, in silence.
MAX_HCAS = 2
#: Pinned memory b12x registers: (2 * world + 2) slots and the flags.
_FLAG_ROOM = 64 << 10
_SPINS = "B12X_ROCE_SPIN_LIMIT"
_GID_INDEX = ("B12X_ROCE_GID_INDEX", "NCCL_IB_GID_INDEX")


@dataclass(frozen=True)
class RoceSettings:
    """root: folder that holds sys, proc, dev and usr of the host; max_mib: largest call in MiB of what a rank sends."""

    root: Path = Path("/")
    max_mib: int = 2

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, rank: int = 0) -> RoceSettings:
        """Read DSV41_ROCE_ROOT (`{rank}` is replaced) and DSV41_ROCE_MAX_MIB (1 to 64).

        Raises SettingsError, naming the variable, the value and what is allowed. An empty value is the default.
        """
        env = os.environ if env is None else env
        text = env.get("DSV41_ROCE_ROOT", "").strip()
        root = Path(text.replace("{rank}", str(rank)) or "/")
        if not root.is_absolute() or not root.is_dir():
            raise SettingsError(f"DSV41_ROCE_ROOT={text!r} on rank {rank}: allowed is the absolute path of a folder")
        size = env.get("DSV41_ROCE_MAX_MIB", "").strip() or str(cls.max_mib)
        if not size.isdecimal() or not 1 <= int(size) <= 64:
            raise SettingsError(f"DSV41_ROCE_MAX_MIB={size!r}: allowed is a whole number of MiB from 1 to 64")
        return cls(root, int(size))

    @property
    def max_bytes(self) -> int:
        return self.max_mib << 20

    def region_bytes(self, world: int) -> int:
        """Pinned host memory per rank, in bytes."""
        return (2 * world + 2) * self.max_bytes + _FLAG_ROOM


@dataclass(frozen=True)
class Hca:
    """Port 1 of an RDMA device at the chosen GID index. mtu is the network interface's, in bytes."""

    name: str
    netdev: str
    mtu: int
    ip: str
    subnet: str


@dataclass(frozen=True)
class HostFacts:
    """What one rank's host says. JSON-able through `as_json`; equal fields are compared by `cross_check`."""

    host: str
    hcas: tuple[Hca, ...] = ()
    gid_index: int = -1
    traffic_class: int = 0
    spin_limit: int = 0  # 0: b12x's default
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostFacts:
        hcas = tuple(Hca(**hca) for hca in data["hcas"])
        return replace(cls(**data), hcas=hcas, problems=tuple(data["problems"]))


def read_host(settings: RoceSettings, world: int, env: Mapping[str, str] | None = None) -> HostFacts:
    """The facts of this host, and every problem that can be seen without another rank. Never raises for a bad host."""
    return _Reader(settings, world, os.environ if env is None else env).read()


@dataclass
class _Reader:
    settings: RoceSettings
    world: int
    env: Mapping[str, str]
    problems: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.root = self.settings.root
        self.host = self._text("proc/sys/kernel/hostname") or socket.gethostname()
        self.devices = self.root / "sys/class/infiniband"

    def read(self) -> HostFacts:
        traffic = self._number(("B12X_ROCE_TRAFFIC_CLASS", "NCCL_IB_TC"), 0, 0, 255)
        spins = self._number((_SPINS,), 0, 1, 2**32 - 1, base=10)
        names = self._chosen()
        usable = [name for name in names if self._usable(name)]
        index = self._gid_index(usable)
        hcas = [hca for name in usable if index >= 0 and (hca := self._hca(name, index))]
        if names:
            self._memory()
            self._tools()
        return HostFacts(self.host, tuple(hcas), index, traffic, spins, tuple(self.problems))

    def _say(self, what: str, value: str, fix: str) -> None:
        self.problems.append(f"{self.host}: {what}: {value}; {fix}")

    def _text(self, path: str | Path) -> str:
        try:
            return (self.root / path).read_text().strip("\0 \n")
        except (OSError, UnicodeDecodeError):  # an empty GID slot answers with EINVAL
            return ""

    def _number(self, names: Sequence[str], default: int, low: int, high: int, base: int = 0) -> int:
        for name in names:
            text = self.env.get(name)
            # Read as b12x does: an empty traffic class is a bad one there, and so is a blank spin limit.
            if text is None or (not text.strip() and name in _GID_INDEX) or (not text and name == _SPINS):
                continue
            try:
                value = int(text, base)
            except ValueError:
                value = low - 1
            if low <= value <= high:
                return value
            self._say(name, repr(text), f"allowed is a whole number from {low} to {high}, or unset it")
            return default
        return default

    # -- which devices -------------------------------------------------------------------------------------------------

    def _chosen(self) -> list[str]:
        try:
            present = sorted(entry.name for entry in self.devices.iterdir())
        except OSError:
            present = []
        if not present:
            self._say(
                str(self.devices),
                "no RDMA device",
                "load the NIC's driver (mlx5_ib), or do not use roce on this host (DSV41_ONESHOT=off)",
            )
            return []
        if not list((self.root / "dev/infiniband").glob("uverbs*")):
            self._say("/dev/infiniband", "no uverbs device", "start the container with --device=/dev/infiniband")
        variable = next((n for n in ("B12X_ROCE_HCA", "NCCL_IB_HCA") if self.env.get(n, "").strip()), "")
        if not variable:
            active = [name for name in present if self._is_active(name)]
            if not active:
                states = ", ".join(f"{name} {self._state(name)}" for name in present)
                self._say("port 1", f"no device is ACTIVE ({states})", "plug the cable in and bring the interface up")
            elif len(active) > MAX_HCAS:
                self._say(
                    ", ".join(active),
                    f"{len(active)} devices are ACTIVE",
                    f"name {MAX_HCAS} in B12X_ROCE_HCA",
                )
            return active[:MAX_HCAS]
        chosen = self._listed(variable, present)
        if len(chosen) > MAX_HCAS:
            said = ", ".join(chosen)
            self._say(variable, f"selects {len(chosen)} devices ({said})", f"name {MAX_HCAS}, everywhere in one order")
        return chosen[:MAX_HCAS]

    def _listed(self, variable: str, present: list[str]) -> list[str]:
        """NCCL's grammar, with the order of the list: `^` excludes, `=` is exact, `name:port`, else also a prefix."""
        text = self.env[variable].strip()
        exclude = text.startswith("^")
        exact = text.lstrip("^").startswith("=")
        chosen: list[str] = []
        items = [part.strip() for part in text.lstrip("^=").split(",") if part.strip()]
        if not items:
            self._say(variable, f"{text!r} names no device", "name one, or unset it")
            return []
        for item in items:
            name, _, port = item.partition(":")
            if port not in ("", "1"):
                self._say(variable, f"{item} names port {port}", "b12x uses port 1 only: name another device")
            found = [name] if name in present else [] if exact else [one for one in present if one.startswith(name)]
            if not found and not exclude:
                self._say(variable, f"there is no device {name} ({', '.join(present)} are there)", "correct the name")
            chosen += [one for one in found if one not in chosen]
        if not exclude:
            return chosen
        left = [name for name in present if name not in chosen and self._is_active(name)]
        if not left:
            self._say(variable, f"{text!r} leaves no ACTIVE device", "name the devices to use instead")
        return left

    def _state(self, name: str) -> str:
        return self._text(f"sys/class/infiniband/{name}/ports/1/state").partition(":")[2].strip() or "without a port 1"

    def _is_active(self, name: str) -> bool:
        return self._state(name) == "ACTIVE"

    def _usable(self, name: str) -> bool:
        port = f"sys/class/infiniband/{name}/ports/1"
        state = self._state(name)
        if state != "ACTIVE":
            self._say(
                f"{name} port 1", f"is {state}", "plug in its cable and bring its interface up, or do not name it"
            )
            return False
        layer = self._text(f"{port}/link_layer")
        if layer != "Ethernet":
            self._say(f"{name} port 1", f"link layer {layer or 'unknown'}", "RoCE needs Ethernet: name another device")
            return False
        return True

    # -- addresses -----------------------------------------------------------------------------------------------------

    def _gid(self, name: str, index: int) -> tuple[ipaddress.IPv6Address | None, str]:
        port = f"sys/class/infiniband/{name}/ports/1"
        try:
            gid = ipaddress.IPv6Address(self._text(f"{port}/gids/{index}"))
        except ipaddress.AddressValueError:
            return None, ""
        return (gid if int(gid) else None), self._text(f"{port}/gid_attrs/types/{index}")

    def _gid_fault(self, name: str, index: int) -> str:
        """What is wrong with a GID, or nothing."""
        gid, kind = self._gid(name, index)
        if gid is None:
            return "is empty"
        if kind != "RoCE v2":
            return f"is {kind or 'of unknown type'}, not RoCE v2"
        if gid.ipv4_mapped is None:
            return f"{gid} is not an IPv4 address" + (" but link-local" if gid.is_link_local else "")
        return ""

    def _good_gids(self, name: str) -> list[int]:
        folder = self.devices / name / "ports/1/gids"
        try:
            indices = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
        except OSError:
            return []
        return [index for index in indices if not self._gid_fault(name, index)]

    def _gid_index(self, names: list[str]) -> int:
        """The one index that all HCAs are used at, or -1."""
        if not names:
            return -1
        good = {name: self._good_gids(name) for name in names}
        offer = ", ".join(f"{name} has them at {_listing(good[name])}" for name in names)
        if any(self.env.get(name, "").strip() for name in _GID_INDEX):
            index = self._number(_GID_INDEX, -1, 0, 255)
            bad = [(name, fault) for name in names if index >= 0 and (fault := self._gid_fault(name, index))]
            for name, fault in bad:
                self._say(
                    f"{name} GID {index}",
                    fault,
                    f"unset B12X_ROCE_GID_INDEX, or take a RoCE v2 IPv4 index ({offer})",
                )
            return -1 if bad else index
        for name in names:
            if not good[name]:
                self._say(f"{name} GIDs", "none is RoCE v2 with an IPv4 address", "give its interface an IPv4 address")
        if not all(good.values()):
            return -1
        common = set.intersection(*(set(indices) for indices in good.values()))
        if not common:
            self._say(
                " and ".join(names),
                f"no common RoCE v2 IPv4 GID index ({offer}), and b12x has one index for all HCAs",
                "give both interfaces one address each, in the same order, or name one HCA in B12X_ROCE_HCA",
            )
            return -1
        return min(common)

    def _hca(self, name: str, index: int) -> Hca | None:
        gid = self._gid(name, index)[0]
        assert gid is not None
        assert gid.ipv4_mapped is not None
        ip = gid.ipv4_mapped
        netdev = self._text(f"sys/class/infiniband/{name}/ports/1/gid_attrs/ndevs/{index}")
        mtu = self._text(f"sys/class/net/{netdev}/mtu") if netdev else ""
        if not mtu.isdecimal():
            self._say(f"{name} GID {index}", "has no network interface with an MTU", "bring its interface up")
            return None
        subnet = self._subnet(netdev, ip)
        if subnet is None:
            self._say(f"{name} ({netdev})", f"{ip} has no connected route", "set the address with its prefix length")
            return None
        return Hca(name, netdev, int(mtu), str(ip), str(subnet))

    def _subnet(self, netdev: str, ip: ipaddress.IPv4Address) -> ipaddress.IPv4Network | None:
        for line in self._text("proc/net/route").splitlines()[1:]:
            cells = line.split()
            if len(cells) > 7 and cells[0] == netdev and cells[2] == "00000000":
                where, mask = (ipaddress.IPv4Address(bytes.fromhex(cells[i])[::-1]) for i in (1, 7))
                network = ipaddress.IPv4Network(f"{where}/{mask}")
                if network.prefixlen and ip in network:
                    return network
        return None

    # -- memory and tools ----------------------------------------------------------------------------------------------

    def _memory(self) -> None:
        found = re.search(r"^Max locked memory\s+(\S+)", self._text("proc/self/limits"), re.MULTILINE)
        limit, need = found[1] if found else "unknown", self.settings.region_bytes(self.world)
        if limit != "unlimited" and not (limit.isdecimal() and int(limit) >= need):
            self._say(
                "memlock",
                f"limit {limit}, {need} bytes are registered",
                "set it to unlimited (docker run --ulimit memlock=-1, or limits.conf)",
            )

    def _tools(self) -> None:
        """b12x compiles its proxy at the first use."""
        folders = [str(self.root) + entry for entry in self.env.get("PATH", "/usr/bin").split(os.pathsep) if entry]
        candidates = [name for name in (self.env.get("CC"), "gcc", "cc", "clang") if name]
        if not any(shutil.which(name, path=os.pathsep.join(folders)) for name in candidates):
            self._say("compiler", f"none of {', '.join(candidates)} is there", "install gcc")
        includes = ["usr/include", "usr/local/include", *filter(None, self.env.get("C_INCLUDE_PATH", "").split(":"))]
        if not any((self.root / one.lstrip("/") / "infiniband/verbs.h").is_file() for one in includes):
            self._say("infiniband/verbs.h", "is missing", "install libibverbs-dev (rdma-core-devel)")


def cross_check(everyone: Sequence[HostFacts]) -> list[str]:
    """What is wrong between the hosts, by rank: one line each, the same on every rank. Local problems come first."""
    lines = [f"rank {rank}: {problem}" for rank, facts in enumerate(everyone) for problem in facts.problems]
    if lines:
        return lines
    lines += _odd(everyone, "HCA count", [str(len(f.hcas)) for f in everyone], "name the same number in B12X_ROCE_HCA")
    if lines:
        return lines
    lines += _odd(everyone, "traffic class", [str(f.traffic_class) for f in everyone], "set B12X_ROCE_TRAFFIC_CLASS")
    lines += _odd(everyone, "B12X_ROCE_SPIN_LIMIT", [str(f.spin_limit) for f in everyone], "set it alike on every rank")
    for position in range(len(everyone[0].hcas)):
        hcas = [facts.hcas[position] for facts in everyone]
        names = [f"{hca.name} ({hca.netdev}, {hca.ip})" for hca in hcas]
        lines += _odd(
            everyone,
            f"HCA {position}: subnet",
            [hca.subnet for hca in hcas],
            "b12x pairs HCAs by position: reorder B12X_ROCE_HCA or recable, so that each position is one subnet",
            names,
        )
        lines += _odd(everyone, f"HCA {position}: MTU", [str(h.mtu) for h in hcas], "set the same everywhere", names)
        for rank, facts in enumerate(everyone):
            same = [r for r in range(rank) if hcas[r].ip == hcas[rank].ip and everyone[r].host != facts.host]
            if same:
                lines.append(
                    f"rank {rank}: {facts.host}: {names[rank]}: the same address as rank {same[0]} "
                    f"({everyone[same[0]].host}); give each host its own"
                )
    return lines


def _odd(
    everyone: Sequence[HostFacts], what: str, values: Sequence[str], fix: str, names: Sequence[str] | None = None
) -> list[str]:
    """A line for each rank whose value is not the most common one (of equals, the lowest rank's)."""
    common = max(values, key=values.count)
    lines: list[str] = []
    for rank, value in enumerate(values):
        if value != common:
            who = f"{everyone[rank].host}: " + (f"{names[rank]}: " if names else "")
            lines.append(f"rank {rank}: {who}{what} is {value}, the others have {common}; {fix}")
    return lines


def _listing(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"
