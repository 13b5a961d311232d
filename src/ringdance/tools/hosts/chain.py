"""Connect a copy's destination hosts into chains, in which each host forwards data to the next host."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ringdance.launch.hosts import HostFacts, shared_networks
from ringdance.tools.hosts.host_set import HostSet


def chained(hosts: HostSet, names: Sequence[str], warn: Callable[[str], None]) -> list[list[str]]:
    """Connect each host to the next one, and return the resulting chains.

    This machine sends data to the first host of each chain. If a host cannot connect to the next one, a new
    chain starts there.

    Args:
        hosts: Hosts whose agents are connected.
        names: Names of the hosts to chain, in this order.
        warn: Called with a warning for each connection that fails.
    """
    tokens = {host: secrets.token_hex(32) for host in names[1:]}
    ports = hosts.ask(
        {host: {"task": "copy", "do": "listen", "token": token} for host, token in tokens.items()}
    )
    reachable = addresses({host: hosts.agents[host].facts for host in names})
    broken: dict[str, str] = {host: answer["problem"] for host, answer in ports.items() if answer["problem"]}
    links = list(pairwise(names))
    # Establish the links in two passes, because a host cannot accept a connection while it is making one.
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
            warn(f"ringdance hosts: {problem}. This machine will send the data to {after} instead.")
    return chains


def addresses(facts: Mapping[str, HostFacts]) -> dict[str, list[str]]:
    """Return the addresses of each host. Addresses on networks that all hosts share come first."""
    networks = shared_networks(facts)
    by_host = {}
    for host, known in facts.items():
        shared = networks.interfaces.get(host, ())
        ordered = sorted(known.networks, key=lambda network: network[0] not in shared)
        # This machine may have reached the host at an address outside the known networks, such as over IPv6.
        all_addresses = [address for _, address, _ in ordered] + [known.reached]
        by_host[host] = list(dict.fromkeys(filter(None, all_addresses))) or ["127.0.0.1"]
    return by_host
