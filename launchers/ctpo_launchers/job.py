"""The job and this node's rank in it: from flags, else from Slurm."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass

from ctpo_launchers import network, slurm
from ctpo_megatron.base.addresses import address_toward

FIRST_PORT = 29400
_LAST_PORT = 65533
_JOBS_BEFORE_PORTS_REPEAT = 100
_PORTS_OF_A_JOB = 16


@dataclass(frozen=True)
class NodeJob:
    """A node of a job. `hosts`: names of all nodes, by rank; `head`: address of node 0, reachable from this node."""

    rank: int
    hosts: tuple[str, ...]
    head: str
    address: str
    """Address of this node, reachable from the others."""
    interface: str | None
    port: int
    """Port of node 0, which uses further ports above it."""

    @property
    def nodes(self) -> int:
        return len(self.hosts)

    def name(self, rank: int) -> str:
        """The name of a node in messages."""
        return f"node {rank} ({self.hosts[rank]})"

    @classmethod
    def of(cls, args: argparse.Namespace) -> NodeJob:
        """From flags, else from Slurm. Raises ValueError naming the missing or invalid flag."""
        hosts = _hosts(args)
        rank = args.node_rank if args.node_rank is not None else int(os.environ.get("SLURM_NODEID", "0"))
        if not 0 <= rank < len(hosts):
            raise ValueError(f"--node-rank {rank} is not one of the {len(hosts)} nodes, which are counted from 0")
        if (args.port or FIRST_PORT) > _LAST_PORT:
            raise ValueError(f"--port {args.port} is not one of 1 to {_LAST_PORT}: node 0 takes two more above it")
        if len(hosts) == 1:
            return cls(rank, hosts, "127.0.0.1", "127.0.0.1", None, 0)
        if args.address is not None and not network.is_address(args.address):
            raise ValueError(f"--address {args.address} is no IP address")
        try:
            head = _reachable(args.head or hosts[0])
            address = args.address or _own_address(args.interface, rank, hosts, head)
            interface = args.interface or network.interface_of(address)
        except OSError as error:
            raise ValueError(f"the head {args.head or hosts[0]} has no address here ({error}): give --head") from error
        return cls(rank, hosts, head if rank else address, address, interface, args.port or _default_port())


def _hosts(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of all nodes; unknown ones are named by their rank."""
    if args.nodes is None and slurm.in_a_job():
        return tuple(slurm.host_names())
    nodes = args.nodes or 1
    if nodes > 1 and (args.head is None or args.node_rank is None):
        raise ValueError("several nodes outside of Slurm need --node-rank (0: the head) and --head (its host) on each")
    known = {args.node_rank: socket.gethostname(), 0: args.head}
    return tuple(known.get(rank) or f"rank {rank}" for rank in range(nodes))


def _reachable(host: str) -> str:
    """The address of a host, from Slurm if only Slurm knows the name. Raises OSError."""
    try:
        return network.resolve(host)
    except OSError:
        if not slurm.in_a_job() or (known := slurm.node_address(host)) in (None, host):
            raise
        return network.resolve(str(known))


def _own_address(interface: str | None, rank: int, hosts: tuple[str, ...], head: str) -> str:
    """Address of the interface, else from Slurm's configuration, else on the route to the head (on the head: to node
    1).

    The host name is not resolved, because Debian maps it to 127.0.1.1.
    """
    if interface is not None:
        return network.address_of_interface(interface)
    if slurm.in_a_job():
        known = slurm.node_address(os.environ.get("SLURMD_NODENAME", hosts[rank]))
        if known is not None and network.is_address(known):
            return known
        return address_toward(head if rank else _reachable(hosts[1]))
    return address_toward(head) if rank else head


def _default_port() -> int:
    """Different for jobs that share a node."""
    return FIRST_PORT + _PORTS_OF_A_JOB * (int(os.environ.get("SLURM_JOB_ID", "0")) % _JOBS_BEFORE_PORTS_REPEAT)
