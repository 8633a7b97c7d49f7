"""Every message of the protocol and its bytes. A change here breaks running peers."""

from __future__ import annotations

from msgspec import Struct

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

GOLDEN: list[tuple[Struct, str]] = [
    (
        m.Hello(1, "w", 7, "host", "shm", "", "", b"id", b"no"),
        "190000009a0101a17707a4686f7374a373686da0a0c4026964c4026e6f",
    ),
    (m.Challenge("n0", b"no", b"pr"), "0d0000009405a26e30c4026e6fc4027072"),
    (m.Proof(b"to"), "060000009206c402746f"),
    (
        m.Welcome(
            1,
            "n0",
            9,
            "host",
            "shm",
            30.0,
            m.ArenaInfo("/s", 16, 8),
            None,
            3,
            [m.NodeAddress("n0", "unix:/s", 2)],
        ),
        "330000009d0201a26e3009a4686f7374a373686dcb403e000000000000945ba22f731008c00391945aa26e30a7756e6978"
        "3a2f730290c0",
    ),
    (
        m.Welcome(1, "n0", 9, "host", "ucx", 30.0, None, m.UcxInfo("h", 5, 6)),
        "240000009d0201a26e3009a4686f7374a3756378cb403e000000000000c0945ca1680506009090c0",
    ),
    (
        m.Welcome(1, "n0", 9, "host", "tcp", 30.0, tcp=m.TcpInfo("h", 5, b"0123456789abcdef", True)),
        "360000009d0201a26e3009a4686f7374a3746370cb403e000000000000c0c00090909566a16805c410303132333435363738"
        "39616263646566c3",
    ),
    (m.Fault(4, "code", "text"), "0d000000940304a4636f6465a474657874"),
    (m.Done(4, 2), "0400000093040402"),
    (m.OpenNamespace(1, "ns", {"dtype": "bf16"}), "13000000950a01a26e7381a56474797065a46266313600"),
    (m.Opened(1, 5), "06000000950b01050700"),
    (
        m.Exists(2, 5, [K]),
        "33000000980c020591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc2c2cb000000000000000000",
    ),
    (m.Present(2, b"\x01\x00"), "0b000000960d02c402010090c40090"),
    (
        m.Present(2, b"\x01\x00", [m.Fate(1.5, "ttl", 2.0)]),
        "23000000960d02c4020100919467cb3ff8000000000000a374746ccb4000000000000000c40090",
    ),
    (
        m.Reserve(3, 5, [K, L], [100, 200]),
        "4f000000970e030592c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fc4201f1e1d1c"
        "1b1a191817161514131211100f0e0d0c0b0a090807060504030201009264ccc8c2c2",
    ),
    (
        m.Reserved(3, [m.Grant(m.GRANTED, 1, 4096, 77, 1 << 40), m.Grant(m.BUSY)]),
        "1c000000930f0392965d0001cd10004dcf0000010000000000965d0200000000",
    ),
    (m.Commit(4, [1], [77], [(1 << 64) - 1]), "120000009610049101914d91cfffffffffffffffff90"),
    (m.Committed(4, b"\x01"), "06000000931104c40101"),
    (m.Abort([1], [77]), "0600000093129101914d"),
    (
        m.Get(5, 5, [K], [300]),
        "2c0000009613050591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f91cd012cc3",
    ),
    (
        m.Got(5, [m.Pin(m.HIT, 1, 4096, 99, 77, 1 << 40), m.Pin(m.MISS)]),
        "2100000096140592975e0001cd1000634dcf0000010000000000975e0100000000009090c3",
    ),
    (m.Release([1], [77]), "0600000093159101914d"),
    (
        m.Wait(6, 5, [K], 1.5),
        "300000009516060591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcb3ff8000000"
        "000000",
    ),
    (
        m.Discard(7, 5, [K], [77]),
        "290000009517070591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f914d",
    ),
    (m.DropNamespace(8, "ns"), "06000000931808a26e73"),
    (m.Clear(9, 5), "0400000093190905"),
    (
        m.Erase(9, 5, [K], ["n1"]),
        "2b000000952b090591c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f91a26e31",
    ),
    (m.Ping(10), "03000000921a0a"),
    (m.Status(11), "03000000921b0b"),
    (
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
        "5f000000dc00131c0ba26e3009cb3ff8000000000000643c1e080203010405919f5fa26e73031e81a161a1620102030405"
        "060780800081a1780108919962a26e30a77463703a683a31020903000000919864a473736430a3737364640a02c281a179"
        "01",
    ),
    (c.GetView(1), "03000000921e01"),
    (
        c.View(0, 7, [m.NodeAddress("n0", "tcp:h:1", 2)], [m.NodeAddress("n1", "unix:/s")]),
        "22000000951d000791945aa26e30a77463703a683a310291945aa26e31a7756e69783a2f7301",
    ),
    (
        c.PutNamespace(
            2,
            "ns",
            c.NamespaceSettings(
                media="ssd",
                policy="lfu",
                ttl_s=1.5,
                quota_bytes=1,
                tier_quota_bytes=2,
                operations_s=3.0,
                bytes_s=4,
                weight=2.0,
                read_token="aa",
                write_token="bb",
                admin_token="cc",
            ),
        ),
        "a5000000941f02a26e738ba56d65646961a3737364a6706f6c696379a36c6675a574746c5f73cb3ff8000000000000ab71"
        "756f74615f627974657301b0746965725f71756f74615f627974657302ac6f7065726174696f6e735f73cb400800000000"
        "0000a762797465735f7304a6776569676874cb4000000000000000aa726561645f746f6b656ea26161ab77726974655f74"
        "6f6b656ea26262ab61646d696e5f746f6b656ea26363",
    ),
    (c.ReplaceNamespace(3, "m@1", "m@2"), "0b000000942003a36d4031a36d4032"),
    (c.ListNamespaces(4), "03000000922104"),
    (
        c.NamespaceList(
            4, [c.NamespaceRecord("ns", 3, 1, {"a": "b"}, c.NamespaceSettings(), True, "m@2", {"n1": 7})]
        ),
        "1b000000932204919961a26e73030181a161a16280c3a36d403281a26e3107",
    ),
    (c.ListPages(5, "ns", 0, 10), "08000000952305a26e73000a"),
    (
        c.PageList(5, [c.PageEntry(K, 300, "dram", 1, True)], 9),
        "33000000942405919665c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fcd012ca464"
        "72616d01c309",
    ),
    (c.Drain(6), "03000000922506"),
    (c.Upgrade(7), "03000000922607"),
    (
        c.Gossip(8, "n0", STATE, b"dd"),
        "44000000952808a26e309863a4706f6f6c919962a26e30a77463703a683a31020903000700919961a26e7301008080c2a0"
        "800791945aa26e30a77463703a683a31020000c4026464",
    ),
    (
        c.Gossiped(8, STATE, b"dd"),
        "410000009429089863a4706f6f6c919962a26e30a77463703a683a31020903000700919961a26e7301008080c2a0800791"
        "945aa26e30a77463703a683a31020000c4026464",
    ),
    (c.ProbePeer(9, "n1"), "06000000932a09a26e31"),
]
