"""Addresses, interfaces and ports of this node."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from ctpo_megatron.base.addresses import is_free

_EPHEMERAL = 32768
"""The kernel uses ports from here on for outgoing connections."""


def is_address(text: str) -> bool:
    """Whether a text is an IP address, not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def resolve(host: str) -> str:
    """The first address of a host name. Raises OSError when there is none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def interface_of(address: str) -> str | None:
    """The network interface with this address, or with its network (`lo` has all of 127.0.0.0/8); None without one."""
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
    """The first IPv4 address of an interface, else its first IPv6 address. Raises ValueError listing the interfaces."""
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
