"""What NCCL took, from its own words: lines in the forms of NCCL 2.29.7's library, which was never run here."""

from __future__ import annotations

import pytest

from ctpo_megatron.preflight.ranks import nccl_transports, transport_finding

HEAD = "host0:71:71 [0] NCCL INFO "
IB = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>"
NETWORK = "Using network IB"
LOGS = {
    "infiniband": [
        IB,
        NETWORK,
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0(8)/GDRDMA/Shared",
        "Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM",
        "NVLS comm 0x55 headRank 0 nHeads 8 nvlsRanks 8 buffSize 1 nvlsPerRankSize 2 nvlsTotalSize 3",
    ],
    "through the host": [NETWORK, "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0", "0 -> 1 via SHM/direct/direct"],
    "tcp": [
        "NET/IB : No device found.",
        "Using network Socket",
        "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0",
    ],
    "plugin": ["Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA"],
    "no channel": ["NET/Socket : Using [0]eth0:10.0.0.1<0>", "Using network Socket"],
    "one node": [NETWORK, "Channel 00 : 0[0] -> 1[1] via P2P/IPC"],
    "nothing": [],
}
EXPECTED = {
    "infiniband": (
        {"NET/IB", "GDRDMA", "P2P", "NVLS"},
        "ok",
        "NET/IB between the nodes, P2P, NVLS within, with GDRDMA",
    ),
    "through the host": ({"NET/IB", "SHM"}, "warning", "NET/IB between the nodes, SHM within, without GDRDMA"),
    "tcp": ({"NET/Socket"}, "warning", "NET/Socket between the nodes, nothing within"),
    "plugin": (
        {"NET/AWS Libfabric", "GDRDMA"},
        "ok",
        "NET/AWS Libfabric between the nodes, nothing within, with GDRDMA",
    ),
    "no channel": ({"NET/Socket"}, "warning", "NET/Socket between the nodes, nothing within"),
    "one node": ({"P2P"}, "warning", "NCCL names no network (P2P within the nodes)"),
    "nothing": (set(), "warning", "NCCL names no network (nothing within the nodes)"),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_transport_is_what_the_channels_take(name: str) -> None:
    names, severity, message = EXPECTED[name]
    log = "".join(f"{HEAD}{line}\n" for line in LOGS[name])
    assert nccl_transports(log) == names
    finding = transport_finding(names, 2)
    assert (finding.key, finding.severity, finding.message) == ("transport", severity, message)
    assert bool(finding.fix) == (severity == "warning")


def test_one_node_needs_no_network() -> None:
    finding = transport_finding({"P2P", "NVLS"}, 1)
    assert (finding.severity, finding.message) == ("ok", "P2P, NVLS within the node")
