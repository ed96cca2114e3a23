"""A folder that looks like a host with RoCE to comm/roce_env.py: two HCAs on two subnets, as a DGX Spark has them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

#: What a process on a healthy host sees of its environment.
ENV = {"PATH": "/usr/bin"}
DEVICES = ("rocep1s0f0", "roceP2p1s0f0")


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def gid_of(ip: str) -> str:
    high, low = divmod(int(IPv4Address(ip)), 1 << 16)
    return f"0000:0000:0000:0000:0000:ffff:{high:04x}:{low:04x}"


def set_gid(root: Path, device: str, index: int, gid: str, kind: str = "RoCE v2", netdev: str = "") -> None:
    port = f"sys/class/infiniband/{device}/ports/1"
    write(root, f"{port}/gids/{index}", gid)
    write(root, f"{port}/gid_attrs/types/{index}", kind)
    write(root, f"{port}/gid_attrs/ndevs/{index}", netdev or "en" + device.removeprefix("roce"))


def set_ip(root: Path, device: str, ip: str, prefix: int = 24, index: int = 3, mtu: int = 9000) -> None:
    netdev = "en" + device.removeprefix("roce")
    set_gid(root, device, index, gid_of(ip))
    write(root, f"sys/class/net/{netdev}/mtu", str(mtu))
    routes = root / "proc/net/route"
    lines = (
        routes.read_text().splitlines() if routes.exists() else ["Iface Destination Gateway Flags Ref Use Metric Mask"]
    )
    network = IPv4Network(f"{ip}/{prefix}", strict=False)
    where, mask = (bytes(a.packed[::-1]).hex().upper() for a in (network.network_address, network.netmask))
    lines = [line for line in lines if not line.startswith(netdev + "\t")]
    lines.append(f"{netdev}\t{where}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0")
    write(root, "proc/net/route", "\n".join(lines))


def host(root: Path, rank: int, devices: tuple[str, ...] = DEVICES) -> Path:
    """Host number `rank`: device h at 10.0.h.(rank + 1)/24, GID index 3, MTU 9000, nothing wrong."""
    write(root, "proc/sys/kernel/hostname", f"spark-{rank}")
    write(root, "proc/self/limits", "Max locked memory         unlimited            unlimited            bytes")
    write(root, "dev/infiniband/uverbs0", "")
    write(root, "usr/include/infiniband/verbs.h", "")
    write(root, "usr/bin/gcc", "")
    (root / "usr/bin/gcc").chmod(0o755)
    for number, device in enumerate(devices):
        port = f"sys/class/infiniband/{device}/ports/1"
        write(root, f"{port}/state", "4: ACTIVE")
        write(root, f"{port}/link_layer", "Ethernet")
        set_gid(root, device, 0, "fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1")
        set_gid(root, device, 1, "fe80:0000:0000:0000:0000:00ff:fe00:0001")
        set_gid(root, device, 2, gid_of(f"10.0.{number}.{rank + 1}"), "IB/RoCE v1")
        set_gid(root, device, 4, "0000:0000:0000:0000:0000:0000:0000:0000")
        set_ip(root, device, f"10.0.{number}.{rank + 1}")
    return root
