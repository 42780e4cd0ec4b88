"""Checks of `cluster`: what can be told before Ray is asked."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from ctpo_megatron.config.problems import Problem, error
from ctpo_megatron.config.schema import Config


def check_cluster(config: Config) -> Iterator[Problem]:
    """An address that is none."""
    address = config.cluster.node_address
    if address is None:
        return
    try:
        ipaddress.ip_address(address)
    except ValueError:
        fix = "give the address that Ray was started with here (ray start --node-ip-address), or null"
        yield error(config, "cluster.node_address", "is no IP address", fix)
