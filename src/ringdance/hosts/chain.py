"""Who passes on to whom: the hosts of a copy in a row, each connected to the next."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from ringdance.hosts.talk import Talk
from ringdance.launch.hosts import HostFacts, meet
from ringdance.launch.remote.connect import Remote


def chained(
    talk: Talk, remotes: Mapping[str, Remote], hosts: Sequence[str], say: Callable[[str], None]
) -> list[list[str]]:
    """Connect each host to the next; rows of hosts, the first of each to be fed from here.

    Args:
        talk: with the hosts' agents.
        remotes: the same, for where the hosts can be reached.
        hosts: in the order of the row.
        say: told which links cannot be made.
    """
    tokens = {host: secrets.token_hex(32) for host in hosts[1:]}
    listen = {host: {"chore": "copy", "do": "listen", "token": token} for host, token in tokens.items()}
    ports = talk.ask_each(listen)
    where = addresses({host: remotes[host].facts for host in hosts})
    broken: dict[str, str] = {host: said["problem"] for host, said in ports.items() if said["problem"]}
    links = list(pairwise(hosts))
    # Two turns: whoever connects does nothing else meanwhile, and must not be waited for.
    for turn in (links[::2], links[1::2]):
        found = talk.ask_each(
            {
                before: {
                    "chore": "copy", "do": "next", "token": tokens[after], "port": ports[after]["port"],
                    "addresses": where[after],
                }
                for before, after in turn if after not in broken
            }
        )  # fmt: skip
        broken |= {after: found[before]["problem"] for before, after in turn if _problem(found, before)}
    rows: list[list[str]] = []
    for host in hosts:
        if host in broken or not rows:
            rows.append([])
        rows[-1].append(host)
    for before, after in links:
        if after in broken and before not in talk.lost and after not in talk.lost:
            say(f"{before} cannot connect to {after} ({broken[after]}); its part goes there from here")
    return rows


def _problem(found: Mapping[str, Mapping[str, str]], host: str) -> str:
    return found[host]["problem"] if host in found else ""


def addresses(facts: Mapping[str, HostFacts]) -> dict[str, list[str]]:
    """Where each host may be connected to: first on the networks that all share."""
    networks = meet(facts)
    found = {}
    for host, known in facts.items():
        shared = networks.interfaces.get(host, ())
        ordered = sorted(known.networks, key=lambda network: network[0] not in shared)
        found[host] = [address for _, address, _ in ordered]
        if known.reached:  # perhaps an IPv6 address, of which facts know nothing more
            found[host].append(known.reached)
        found[host] = list(dict.fromkeys(found[host])) or ["127.0.0.1"]
    return found
