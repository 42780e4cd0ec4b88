"""What NCCL took, from its own words: lines in the forms of NCCL 2.29.7's library, which was never run here."""

from __future__ import annotations

import pytest

from ctpo_megatron.checks import nccl_transports, transport_finding

HEAD = "host0:71:71 [0] NCCL INFO "
IB = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>"
NETWORK = "Using network IB"
OF_INFINIBAND = [
    IB,
    NETWORK,
    "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0(8)/GDRDMA/Shared",
    "Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM",
    "NVLS comm 0x55 headRank 0 nHeads 8 nvlsRanks 8 buffSize 1 nvlsPerRankSize 2 nvlsTotalSize 3",
]
THROUGH_HOST = [NETWORK, "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0", "0 -> 1 via SHM/direct/direct"]
SOCKET = "Using network Socket"
OF_TCP = ["NET/IB : No device found.", SOCKET, "Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0"]
PLUGIN = ["Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA"]
NO_CHANNEL = ["NET/Socket : Using [0]eth0:10.0.0.1<0>", SOCKET]
ONE_NODE = [NETWORK, "Channel 00 : 0[0] -> 1[1] via P2P/IPC"]
LOGS: list[tuple[list[str], str, str]] = [
    (OF_INFINIBAND, "NET/IB GDRDMA P2P NVLS", "NET/IB between the nodes, P2P, NVLS within, with GDRDMA"),
    (THROUGH_HOST, "NET/IB SHM", "NET/IB between the nodes, SHM within, without GDRDMA"),
    (OF_TCP, "NET/Socket", "NET/Socket between the nodes, nothing within"),
    (PLUGIN, "NET/AWS_Libfabric GDRDMA", "NET/AWS Libfabric between the nodes, nothing within, with GDRDMA"),
    (NO_CHANNEL, "NET/Socket", "NET/Socket between the nodes, nothing within"),
    (ONE_NODE, "P2P", "NCCL names no network (P2P within the nodes)"),
    ([], "", "NCCL names no network (nothing within the nodes)"),
]


@pytest.mark.parametrize(("lines", "names", "message"), LOGS)
def test_the_transport_is_what_the_channels_take(lines: list[str], names: str, message: str) -> None:
    taken = {name.replace("_", " ") for name in names.split()}
    assert nccl_transports("".join(f"{HEAD}{line}\n" for line in lines)) == taken
    finding = transport_finding(taken, 2)
    severity = "ok" if "with GDRDMA" in message else "warning"
    assert (finding.key, finding.severity, finding.message) == ("transport", severity, message)
    assert bool(finding.fix) == (severity == "warning")


def test_one_node_needs_no_network() -> None:
    finding = transport_finding({"P2P", "NVLS"}, 1)
    assert (finding.severity, finding.message) == ("ok", "P2P, NVLS within the node")
