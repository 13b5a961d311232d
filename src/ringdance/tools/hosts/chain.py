"""Connect the destination hosts of a copy into chains, in which each host forwards data to the next."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ringdance.launch.hosts import HostFacts, shared_networks
from ringdance.tools.hosts.host_set import HostSet


def chained(hosts: HostSet, names: Sequence[str], warn: Callable[[str], None]) -> list[list[str]]:
    """Connect each host to the next. Returns the chains. This machine sends to each chain's first host.

    A new chain starts wherever a connection cannot be made.

    Args:
        hosts: Connected hosts.
        names: Hosts to chain, in order.
        warn: Called with a message for each connection that cannot be made.
    """
    tokens = {host: secrets.token_hex(32) for host in names[1:]}
    ports = hosts.ask(
        {host: {"task": "copy", "do": "listen", "token": token} for host, token in tokens.items()}
    )
    reachable = addresses({host: hosts.agents[host].facts for host in names})
    broken: dict[str, str] = {host: answer["problem"] for host, answer in ports.items() if answer["problem"]}
    links = list(pairwise(names))
    # Make every other link first, because a host cannot accept a connection while it is making one.
    for half in (links[::2], links[1::2]):
        tried = {before: after for before, after in half if after not in broken}
        answers = hosts.ask(
            {
                before: {
                    "task": "copy", "do": "next", "token": tokens[after], "port": ports[after]["port"],
                    "addresses": reachable[after],
                }
                for before, after in tried.items()
            }
        )  # fmt: skip
        broken |= {tried[host]: answer["problem"] for host, answer in answers.items() if answer["problem"]}
    chains: list[list[str]] = [[names[0]]]
    for before, after in links:
        if after not in broken:
            chains[-1].append(after)
            continue
        chains.append([after])
        if before not in hosts.problems and after not in hosts.problems:
            problem = f"{before} cannot connect to {after} ({broken[after]})"
            warn(f"ringdance hosts: {problem}. This machine will send to {after} instead")
    return chains


def addresses(facts: Mapping[str, HostFacts]) -> dict[str, list[str]]:
    """Return each host's addresses. Addresses on networks that all hosts share come first."""
    networks = shared_networks(facts)
    by_host = {}
    for host, known in facts.items():
        shared = networks.interfaces.get(host, ())
        ordered = sorted(known.networks, key=lambda network: network[0] not in shared)
        # The address at which this machine reached the host may not be on any of the known networks (IPv6).
        all_addresses = [address for _, address, _ in ordered] + [known.reached]
        by_host[host] = list(dict.fromkeys(filter(None, all_addresses))) or ["127.0.0.1"]
    return by_host
