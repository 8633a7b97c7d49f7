"""Every message of the protocol and its bytes. A change here breaks running peers of other versions."""

from __future__ import annotations

import pytest

from pdserve.kvpool.protocol import cluster_messages as c
from pdserve.kvpool.protocol import messages as m

K = bytes(range(32))
L = bytes(reversed(range(32)))
STATE = c.ClusterState(
    "pool",
    [c.Member("n0", "tcp:h:1", 2, 9, 3, c.ACTIVE, 7)],
    [c.NamespaceRecord("ns", 1, 0, {})],
    7,
    [m.NodeAddress("n0", "tcp:h:1", 2)],
)

GOLDEN = [
    pytest.param(
        m.Hello(1, "w", 7, "host", "shm", "tok"),
        "15000000990101a17707a4686f7374a373686da3746f6bc2a0",
        id="hello",
    ),
    pytest.param(
        m.Welcome(
            1,
            "n0",
            9,
            "host",
            "shm",
            30.0,
            m.ArenaInfo("/a", 16, "/t", 8),
            None,
            3,
            [m.NodeAddress("n0", "unix:/s", 2)],
        ),
        (
            "350000009c0201a26e3009a4686f7374a373686dcb403e000000000000955ba22f6110a22f7408c00391945a"
            "a26e30a7756e69783a2f730290"
        ),
        id="welcome_shm",
    ),
    pytest.param(
        m.Welcome(1, "n0", 9, "host", "ucx", 30.0, None, m.UcxInfo("h", 5, 6)),
        "230000009c0201a26e3009a4686f7374a3756378cb403e000000000000c0945ca1680506009090",
        id="welcome_ucx",
    ),
    pytest.param(
        m.Fault(4, "code", "text"),
        "0d000000940304a4636f6465a474657874",
        id="fault",
    ),
    pytest.param(
        m.Done(4, 2),
        "0400000093040402",
        id="done",
    ),
    pytest.param(
        m.OpenNamespace(1, "ns", {"dtype": "bf16"}),
        "13000000950a01a26e7381a56474797065a46266313600",
        id="open_namespace",
    ),
    pytest.param(
        m.Opened(1, 5),
        "05000000940b010507",
        id="opened",
    ),
    pytest.param(
        m.Exists(2, 5, [K]),
        "27000000940c020591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        id="exists",
    ),
    pytest.param(
        m.Present(2, b"\x01\x00"),
        "07000000930d02c4020100",
        id="present",
    ),
    pytest.param(
        m.Reserve(3, 5, [K, L], [100, 200]),
        (
            "4e000000960e030592c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4"
            "201f1e1d1c1b1a191817161514131211100f0e0d0c0b0a090807060504030201009264ccc8c2"
        ),
        id="reserve",
    ),
    pytest.param(
        m.Reserved(3, [m.Grant(m.GRANTED, 1, 4096, 77, 1 << 40), m.Grant(m.BUSY)]),
        "1c000000930f0392965d0001cd10004dcf0000010000000000965d0200000000",
        id="reserved",
    ),
    pytest.param(
        m.Commit(4, [1], [77], [(1 << 64) - 1]),
        "120000009610049101914d91cfffffffffffffffff90",
        id="commit",
    ),
    pytest.param(
        m.Committed(4, b"\x01"),
        "06000000931104c40101",
        id="committed",
    ),
    pytest.param(
        m.Abort([1], [77]),
        "0600000093129101914d",
        id="abort",
    ),
    pytest.param(
        m.Get(5, 5, [K], [300]),
        ("2b0000009513050591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f91cd012c"),
        id="get",
    ),
    pytest.param(
        m.Got(5, [m.Pin(m.HIT, 1, 4096, 99, 77, 1 << 40), m.Pin(m.MISS)]),
        "2200000095140592985e0001cd1000634dcf000001000000000000985e010000000000009090",
        id="got",
    ),
    pytest.param(
        m.Release([1], [77]),
        "0600000093159101914d",
        id="release",
    ),
    pytest.param(
        m.Wait(6, 5, [K], 1.5),
        (
            "300000009516060591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcb"
            "3ff8000000000000"
        ),
        id="wait",
    ),
    pytest.param(
        m.Discard(7, 5, [K], [77]),
        ("290000009517070591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f914d"),
        id="discard",
    ),
    pytest.param(
        m.DropNamespace(8, "ns"),
        "06000000931808a26e73",
        id="drop_namespace",
    ),
    pytest.param(
        m.Clear(9, 5),
        "0400000093190905",
        id="clear",
    ),
    pytest.param(
        m.Ping(10),
        "03000000921a0a",
        id="ping",
    ),
    pytest.param(
        m.Status(11),
        "03000000921b0b",
        id="status",
    ),
    pytest.param(
        m.StatusReport(
            11,
            "n0",
            9,
            1.5,
            100,
            60,
            30,
            8,
            2,
            3,
            1,
            4,
            5,
            [m.NamespaceStatus("ns", 3, 30, {"a": "b"}, 1, 2, 3, 4, 5, 6, 7)],
            {"x": 1},
            8,
            [c.Member("n0", "tcp:h:1", 2, 9, 3)],
            [c.TierStatus("ssd0", "ssd", 100, 10, 2, False, {"y": 1})],
        ),
        (
            "96000000dc00131c0ba26e3009cb3ff8000000000000643c1e080203010405919f5fa26e73031e81a161a162"
            "010203040506079c60a86472616d2b737364a36c7275cb00000000000000000000cb0000000000000000cb00"
            "00000000000000cb3ff0000000000000a0a0a0800081a1780108919962a26e30a77463703a683a3102090300"
            "0000919864a473736430a3737364640a02c281a17901"
        ),
        id="status_report",
    ),
    pytest.param(c.GetView(1), "03000000921e01", id="get_view"),
    pytest.param(
        c.View(0, 7, [m.NodeAddress("n0", "tcp:h:1", 2)], [m.NodeAddress("n1", "unix:/s")]),
        "22000000951d000791945aa26e30a77463703a683a310291945aa26e31a7756e69783a2f7301",
        id="view",
    ),
    pytest.param(
        c.PutNamespace(
            2, "ns", c.NamespaceSettings("ssd", "lfu", 1.5, 1, 2, 3.0, 4.0, 2.0, "aa", "bb", "cc")
        ),
        (
            "3f000000941f02a26e739c60a3737364a36c6675cb3ff80000000000000102cb4008000000000000cb401000"
            "0000000000cb4000000000000000a26161a26262a26363"
        ),
        id="put_namespace",
    ),
    pytest.param(
        c.ReplaceNamespace(3, "m@1", "m@2"), "0b000000942003a36d4031a36d4032", id="replace_namespace"
    ),
    pytest.param(c.ListNamespaces(4), "03000000922104", id="list_namespaces"),
    pytest.param(
        c.NamespaceList(4, [c.NamespaceRecord("ns", 3, 1, {"a": "b"}, c.NamespaceSettings(), True, "m@2")]),
        (
            "4d000000932204919861a26e73030181a161a1629c60a86472616d2b737364a36c7275cb0000000000000000"
            "0000cb0000000000000000cb0000000000000000cb3ff0000000000000a0a0a0c3a36d4032"
        ),
        id="namespace_list",
    ),
    pytest.param(c.ListPages(5, "ns", 0, 10), "08000000952305a26e73000a", id="list_pages"),
    pytest.param(
        c.PageList(5, [c.PageEntry(K, 300, "dram", 1, True, 0.5)], 9),
        (
            "3c000000942405919765c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
            "cd012ca46472616d01c3cb3fe000000000000009"
        ),
        id="page_list",
    ),
    pytest.param(c.Drain(6), "03000000922506", id="drain"),
    pytest.param(c.Upgrade(7), "03000000922607", id="upgrade"),
    pytest.param(
        c.Gossip(8, "n0", STATE, b"dd"),
        (
            "7b000000952808a26e309963a4706f6f6c919962a26e30a77463703a683a31020903000700919861a26e7301"
            "00809c60a86472616d2b737364a36c7275cb00000000000000000000cb0000000000000000cb000000000000"
            "0000cb3ff0000000000000a0a0a0c2a00791945aa26e30a77463703a683a3102000090c4026464"
        ),
        id="gossip",
    ),
    pytest.param(
        c.Gossiped(8, STATE, b"dd"),
        (
            "780000009429089963a4706f6f6c919962a26e30a77463703a683a31020903000700919861a26e730100809c"
            "60a86472616d2b737364a36c7275cb00000000000000000000cb0000000000000000cb0000000000000000cb"
            "3ff0000000000000a0a0a0c2a00791945aa26e30a77463703a683a3102000090c4026464"
        ),
        id="gossiped",
    ),
    pytest.param(c.ProbePeer(9, "n1"), "06000000932a09a26e31", id="probe_peer"),
    pytest.param(c.ListOwned(10, 5, "n1", 7, 0, 100), "0a000000972b0a05a26e31070064", id="list_owned"),
    pytest.param(
        c.Owned(10, [K], [300], 44, 2),
        ("2c000000962c0a91c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f91cd012c2c02"),
        id="owned",
    ),
    pytest.param(
        c.PullPages(11, 5, [K]),
        "28000000952d0b0591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f90",
        id="pull_pages",
    ),
    pytest.param(
        c.EndReplicas(12, 5, [K]),
        "27000000942e0c0591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        id="end_replicas",
    ),
]
