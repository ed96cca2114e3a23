"""comm/roce_env.py on folders that look like hosts: each fault found on its host, with the value and the fix."""

from __future__ import annotations

import json

import pytest

from dsv41_dist.comm.errors import SettingsError
from dsv41_dist.comm.roce_env import HostFacts, RoceSettings, cross_check, read_host

from .fake_host import DEVICES, ENV, host, set_gid, set_ip, write

PORT = f"sys/class/infiniband/{DEVICES[1]}/ports/1"


def read(root, world=4, **env):
    return read_host(RoceSettings(root), world, {**ENV, **env})


def test_a_healthy_host_is_read_whole(tmp_path):
    facts = read(host(tmp_path, 2))
    assert facts.problems == ()
    assert (facts.host, facts.gid_index, facts.traffic_class, facts.spin_limit) == ("spark-2", 3, 0, 0)
    assert [(h.name, h.netdev, h.mtu, h.ip, h.subnet) for h in facts.hcas] == [
        ("roceP2p1s0f0", "enP2p1s0f0", 9000, "10.0.1.3", "10.0.1.0/24"),
        ("rocep1s0f0", "enp1s0f0", 9000, "10.0.0.3", "10.0.0.0/24"),
    ]
    assert HostFacts.from_json(json.loads(json.dumps(facts.as_json()))) == facts


def _down(root):
    write(root, f"{PORT}/state", "1: DOWN")
    return {"B12X_ROCE_HCA": ",".join(DEVICES)}


def _infiniband(root):
    write(root, f"{PORT}/link_layer", "InfiniBand")


def _no_ipv4(root):
    set_gid(root, DEVICES[1], 3, "0000:0000:0000:0000:0000:0000:0000:0000")


def _drifted(root):
    _no_ipv4(root)
    set_ip(root, DEVICES[1], "10.0.1.3", index=5)


def _pinned_v1(root):
    return {"NCCL_IB_GID_INDEX": "2"}


def _pinned_link_local(root):
    return {"B12X_ROCE_GID_INDEX": "1"}


def _pinned_empty(root):
    return {"B12X_ROCE_GID_INDEX": "4"}


def _pinned_word(root):
    return {"B12X_ROCE_GID_INDEX": "three"}


def _memlock(root):
    write(root, "proc/self/limits", "Max locked memory         65536                65536                bytes")


def _no_uverbs(root):
    (root / "dev/infiniband/uverbs0").unlink()


def _no_header(root):
    (root / "usr/include/infiniband/verbs.h").unlink()


def _no_compiler(root):
    (root / "usr/bin/gcc").unlink()


def _no_mtu(root):
    (root / "sys/class/net/enP2p1s0f0/mtu").unlink()


def _no_route(root):
    write(root, "proc/net/route", "Iface Destination Gateway Flags Ref Use Metric Mask")


def _three(root):
    host(root, 2, (*DEVICES, "rocep3s0f0"))


def _three_named(root):
    _three(root)
    return {"B12X_ROCE_HCA": "rocep1s0f0,roceP2p1s0f0,rocep3s0f0"}


FAULTS = [
    (_down, "roceP2p1s0f0 port 1: is DOWN", "plug in its cable"),
    (_infiniband, "roceP2p1s0f0 port 1: link layer InfiniBand", "RoCE needs Ethernet"),
    (_no_ipv4, "roceP2p1s0f0 GIDs: none is RoCE v2 with an IPv4 address", "IPv4 address"),
    (
        _drifted,
        "no common RoCE v2 IPv4 GID index (roceP2p1s0f0 has them at 5, rocep1s0f0 has them at 3)",
        "one address",
    ),
    (_pinned_v1, "rocep1s0f0 GID 2: is IB/RoCE v1, not RoCE v2", "has them at 3"),
    (_pinned_link_local, "rocep1s0f0 GID 1: fe80::ff:fe00:1 is not an IPv4 address but link-local", "has them at 3"),
    (_pinned_empty, "rocep1s0f0 GID 4: is empty", "has them at 3"),
    (_pinned_word, "B12X_ROCE_GID_INDEX: 'three'", "whole number from 0 to 255"),
    (_memlock, "memlock: limit 65536, 21037056 bytes are registered", "ulimit memlock=-1"),
    (_no_uverbs, "/dev/infiniband: no uverbs device", "--device=/dev/infiniband"),
    (_no_header, "infiniband/verbs.h: is missing", "libibverbs-dev"),
    (_no_compiler, "compiler: none of gcc, cc, clang is there", "install gcc"),
    (_no_mtu, "roceP2p1s0f0 GID 3: has no network interface with an MTU", "bring its interface up"),
    (_no_route, "rocep1s0f0 (enp1s0f0): 10.0.0.3 has no connected route", "prefix length"),
    (_three, "3 devices are ACTIVE", "name 2 in B12X_ROCE_HCA"),
    (_three_named, "selects 3 devices", "name 2"),
    (lambda root: {"B12X_ROCE_HCA": "rocep9s0f0"}, "there is no device rocep9s0f0", "correct the name"),
    (lambda root: {"NCCL_IB_HCA": "^roce"}, "'^roce' leaves no ACTIVE device", "name the devices"),
    (lambda root: {"NCCL_IB_HCA": "^=,"}, "NCCL_IB_HCA: '^=,' names no device", "name one, or unset it"),
    (lambda root: {"B12X_ROCE_HCA": "="}, "B12X_ROCE_HCA: '=' names no device", "name one, or unset it"),
    (lambda root: {"NCCL_IB_HCA": "=rocep1s0f0:2"}, "names port 2", "port 1 only"),
    (lambda root: {"NCCL_IB_TC": "300"}, "NCCL_IB_TC: '300'", "0 to 255"),
    (lambda root: {"B12X_ROCE_TRAFFIC_CLASS": ""}, "B12X_ROCE_TRAFFIC_CLASS: ''", "unset it"),
    (lambda root: {"B12X_ROCE_SPIN_LIMIT": "0x10000"}, "B12X_ROCE_SPIN_LIMIT: '0x10000'", "whole number"),
    (lambda root: {"B12X_ROCE_SPIN_LIMIT": " "}, "B12X_ROCE_SPIN_LIMIT: ' '", "whole number"),
    (lambda root: {"B12X_ROCE_SPIN_LIMIT": "20s"}, "B12X_ROCE_SPIN_LIMIT: '20s'", "whole number"),
]


@pytest.mark.parametrize(("spoil", "said", "fix"), FAULTS, ids=[said[:40] for _, said, _ in FAULTS])
def test_a_fault_is_said_with_host_device_value_and_fix(tmp_path, spoil, said, fix):
    env = spoil(host(tmp_path, 2)) or {}
    problems = [p for p in read(tmp_path, **env).problems if said in p]
    assert problems, read(tmp_path, **env).problems
    assert problems[0].startswith("spark-2: ")
    assert fix in problems[0]


def test_without_any_device_one_line_says_it_all(tmp_path):
    (problem,) = read(tmp_path).problems
    assert "no RDMA device" in problem
    assert "mlx5_ib" in problem


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({}, ["roceP2p1s0f0", "rocep1s0f0"]),
        ({"B12X_ROCE_HCA": "rocep1s0f0,roceP2p1s0f0"}, ["rocep1s0f0", "roceP2p1s0f0"]),
        ({"B12X_ROCE_HCA": "rocep1s0f0"}, ["rocep1s0f0"]),
        ({"NCCL_IB_HCA": "^rocep1"}, ["roceP2p1s0f0"]),
        ({"NCCL_IB_HCA": "^=rocep1s0f0:1"}, ["roceP2p1s0f0"]),
        ({"NCCL_IB_HCA": "roceP"}, ["roceP2p1s0f0"]),
        ({"B12X_ROCE_HCA": " ", "NCCL_IB_HCA": "rocep1s0f0"}, ["rocep1s0f0"]),
    ],
)
def test_lists_are_read_as_nccl_reads_them(tmp_path, env, names):
    facts = read(host(tmp_path, 0), **env)
    assert facts.problems == ()
    assert [hca.name for hca in facts.hcas] == names


def test_a_gid_index_that_both_devices_share_is_found(tmp_path):
    host(tmp_path, 0)
    for number, device in enumerate(DEVICES):
        set_gid(tmp_path, device, 3, "0000:0000:0000:0000:0000:0000:0000:0000")
        set_ip(tmp_path, device, f"10.0.{number}.1", index=6)
    assert (read(tmp_path).problems, read(tmp_path).gid_index) == ((), 6)
    assert read(tmp_path, B12X_ROCE_GID_INDEX="", NCCL_IB_GID_INDEX="6").gid_index == 6


def group(tmp_path, spoil=None, rank=2, **env):
    roots = [host(tmp_path / str(r), r) for r in range(4)]
    extra = (spoil(roots[rank]) or {}) if spoil else {}
    return cross_check([read(root, **({**env, **extra} if r == rank else env)) for r, root in enumerate(roots)])


def test_four_healthy_hosts_agree(tmp_path):
    assert group(tmp_path) == []


def _crossed(root):
    return {"B12X_ROCE_HCA": "rocep1s0f0,roceP2p1s0f0"}


def _mtu(root):
    write(root, "sys/class/net/enp1s0f0/mtu", "1500")


def _one_hca(root):
    return {"B12X_ROCE_HCA": "rocep1s0f0"}


def _same_address(root):
    set_ip(root, DEVICES[0], "10.0.0.1")


def _other_class(root):
    return {"NCCL_IB_TC": "106"}


@pytest.mark.parametrize(
    ("spoil", "count", "said"),
    [
        (
            _crossed,
            2,
            "rank 2: spark-2: rocep1s0f0 (enp1s0f0, 10.0.0.3): HCA 0: subnet is 10.0.0.0/24, the others",
        ),
        (_mtu, 1, "rank 2: spark-2: rocep1s0f0 (enp1s0f0, 10.0.0.3): HCA 1: MTU is 1500, the others have 9000"),
        (_one_hca, 1, "rank 2: spark-2: HCA count is 1, the others have 2"),
        (_same_address, 1, "rank 2: spark-2: rocep1s0f0 (enp1s0f0, 10.0.0.1): the same address as rank 0 (spark-0)"),
        (_other_class, 1, "rank 2: spark-2: traffic class is 106, the others have 0"),
        (_down, 1, "rank 2: spark-2: roceP2p1s0f0 port 1: is DOWN"),
    ],
)
def test_the_one_host_that_differs_is_named(tmp_path, spoil, count, said):
    lines = group(tmp_path, spoil)
    assert len(lines) == count
    assert lines[0].startswith(said)


@pytest.mark.parametrize("text", ["0", "65", "2.5", "much"])
def test_a_bad_size_is_refused_by_name(text):
    with pytest.raises(SettingsError, match=f"DSV41_ROCE_MAX_MIB='{text}'.*1 to 64"):
        RoceSettings.from_env({"DSV41_ROCE_MAX_MIB": text})


def test_a_root_is_a_folder_and_may_hold_the_rank(tmp_path):
    (tmp_path / "host3").mkdir()
    root = str(tmp_path / "host{rank}")
    assert RoceSettings.from_env({"DSV41_ROCE_ROOT": root}, rank=3).root == tmp_path / "host3"
    with pytest.raises(SettingsError, match=r"DSV41_ROCE_ROOT=.*on rank 4"):
        RoceSettings.from_env({"DSV41_ROCE_ROOT": root}, rank=4)
    assert RoceSettings.from_env({"DSV41_ROCE_ROOT": ""}) == RoceSettings()
