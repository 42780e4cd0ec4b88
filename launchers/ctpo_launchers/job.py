"""The job and this node's rank in it: from flags, else from Slurm; addresses, interfaces and ports of the node."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from dataclasses import dataclass

import psutil

from ctpo_launchers import slurm
from ctpo_megatron.base.addresses import address_toward, is_free

FIRST_PORT = 29400
_LAST_PORT = 65533
_JOBS_BEFORE_PORTS_REPEAT = 100
_PORTS_OF_A_JOB = 16
_EPHEMERAL = 32768
"""The kernel uses ports from here on for outgoing connections."""


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
        """Return the name of a node in messages."""
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
        if args.address is not None and not is_address(args.address):
            raise ValueError(f"--address {args.address} is no IP address")
        try:
            head = _reachable(args.head or hosts[0])
            address = args.address or _own_address(args.interface, rank, hosts, head)
            interface = args.interface or interface_of(address)
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
        return resolve(host)
    except OSError:
        if not slurm.in_a_job() or (known := slurm.node_address(host)) in (None, host):
            raise
        return resolve(str(known))


def _own_address(interface: str | None, rank: int, hosts: tuple[str, ...], head: str) -> str:
    """Address of the interface, else from Slurm's configuration, else on the route to the head (on the head: to node
    1).

    The host name is not resolved, because Debian maps it to 127.0.1.1.
    """
    if interface is not None:
        return address_of_interface(interface)
    if slurm.in_a_job():
        known = slurm.node_address(os.environ.get("SLURMD_NODENAME", hosts[rank]))
        if known is not None and is_address(known):
            return known
        return address_toward(head if rank else _reachable(hosts[1]))
    return address_toward(head) if rank else head


def _default_port() -> int:
    """Different for jobs that share a node."""
    return FIRST_PORT + _PORTS_OF_A_JOB * (int(os.environ.get("SLURM_JOB_ID", "0")) % _JOBS_BEFORE_PORTS_REPEAT)


def is_address(text: str) -> bool:
    """Return whether a text is an IP address, not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def resolve(host: str) -> str:
    """Return the first address of a host name. Raises OSError when there is none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def interface_of(address: str) -> str | None:
    """Return the network interface with this address, or with its network (`lo` has all of 127.0.0.0/8); None without
    one.
    """
    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or not entry.netmask:
                continue
            own = entry.address.partition("%")[0]
            if wanted == ipaddress.ip_address(own) or wanted in _network(own, entry.netmask):
                return name
    return None


def address_of_interface(name: str) -> str:
    """Return the first IPv4 address of an interface, else its first IPv6 address. Raises ValueError listing the
    interfaces.
    """
    entries = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries.get(name, []):
            if entry.family == family:
                return entry.address.partition("%")[0]
    raise ValueError(f"no interface {name!r} with an address here; there are {', '.join(sorted(entries))}")


def free_ports(address: str, first: int, count: int) -> list[int]:
    """Free ports from `first` on, below the ephemeral ones. Raises OSError if there are too few."""
    found: list[int] = []
    for port in range(first, min(max(_EPHEMERAL, first + 100), 65536)):
        if len(found) == count:
            break
        if is_free(address, port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"no {count} free ports from {first} on at {address}: give another --port")
    return found


def _network(address: str, mask: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    length = mask if "." in mask else bin(int(ipaddress.IPv6Address(mask))).count("1")
    return ipaddress.ip_network(f"{address}/{length}", strict=False)
