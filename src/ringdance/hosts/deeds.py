"""What each of the commands of ``ringdance hosts`` does."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringdance.errors import LaunchError
from ringdance.hosts import command, show, source, trust
from ringdance.hosts.bar import Bar
from ringdance.hosts.copy import Copy, Outcome
from ringdance.hosts.members import Members
from ringdance.hosts.talk import Talk
from ringdance.launch.directories import bases
from ringdance.launch.output.merge import spans
from ringdance.launch.plan import table


def list_(arguments: argparse.Namespace, members: Members) -> int:
    """Hosts, whether they answer, and what of ours runs there."""
    jobs = {host: said["jobs"] for host, said in _ask(members, arguments, {"chore": "jobs"}).items()}
    rows = []
    for host, slots in members.slots.items():
        remote = members.remotes.get(host)
        rows.append(
            {
                "host": host,
                "slots": slots or None,
                "reachable": host in jobs,
                "problem": members.problems.get(host, ""),
                "name": remote.facts.name if remote else None,
                "cores": remote.facts.cores if remote else None,
                "devices": list(remote.facts.devices) if remote else [],
                "jobs": jobs.get(host, {}),
            }
        )
    if arguments.format == "json":
        print(json.dumps(rows, indent=2))
    else:
        head = ("host", "slots", "answers", "cores", "devices", "ranks of ours")
        print("\n".join(table([head, *map(_row, rows)])))
        _tell(members.problems)
    return int(bool(members.problems))


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    names = row["devices"]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    jobs = [
        f"job {job[:8]}: " + (spans(found["ranks"]) if found["ranks"] else f"{found['processes']} processes")
        for job, found in row["jobs"].items()
    ]
    cells = (row["slots"], "yes" if row["reachable"] else "no", row["cores"], devices, "; ".join(jobs))
    return (row["host"], *(str(cell) if cell else "-" for cell in cells))


def _ask(
    members: Members, arguments: argparse.Namespace, message: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Have all agents do something; the answers of those who did, what is wrong with the others is noted."""
    members.connect(arguments.connect_timeout)
    return _again(members, message)


def _again(members: Members, message: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    talk = Talk(members.remotes)
    answers = talk.ask(message)
    talk.close()
    members.problems |= {host: said["problem"] for host, said in answers.items() if said["problem"]}
    return {host: said for host, said in answers.items() if not said["problem"]}


def _tell(problems: Mapping[str, str]) -> None:
    sys.stdout.flush()
    for host, problem in problems.items():
        print(f"ringdance hosts: host {host}: {problem}", file=sys.stderr)


def run(arguments: argparse.Namespace, members: Members) -> int:
    """A command on every host."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        raise LaunchError("what is to be run? For example: ringdance hosts run -H node1,node2 -- uptime")
    if arguments.timeout is not None and not arguments.timeout > 0:
        raise LaunchError(f"--timeout {arguments.timeout:g}: it must be more than 0 seconds")
    members.connect(arguments.connect_timeout)
    live = arguments.live and arguments.format == "table"
    told: list[str] = []

    def waiting(hosts: Sequence[str]) -> None:
        if sys.stderr.isatty() and not live and list(hosts) != told:
            told[:] = hosts
            words = f"waiting for {', '.join(hosts[:5])}{' ...' if hosts[5:] else ''}" if hosts else ""
            os.write(2, f"\r\033[K{words}".encode())

    found = command.run(
        members, words, folder=arguments.folder, timeout=arguments.timeout, live=_live if live else None,
        waiting=waiting,
    )  # fmt: skip
    if arguments.format == "json":
        rows = [
            {"host": host, **dataclasses.asdict(ran), "output": ran.output.decode(errors="replace")}
            for host, ran in found.items()
        ]
        print(json.dumps(rows, indent=2))
    else:
        _show_runs(found, live)
    return command.exit_code(found)


def _live(host: str, piece: bytes) -> None:
    end = b"" if piece.endswith((b"\n", b"\r")) else b"\n"
    sys.stdout.buffer.write(f"<{host}> ".encode() + piece + end)
    sys.stdout.buffer.flush()


def _show_runs(found: Mapping[str, command.Ran], live: bool) -> None:
    """Each outcome once, below the hosts that have it."""
    for hosts, ran in command.grouped(found):
        head = f"{hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} hosts: {', '.join(hosts)}"
        if live:
            if ran.code:
                _tell(dict.fromkeys(hosts, ran.problem or f"exit code {ran.code}"))
            continue
        code = f" (exit code {ran.code})" if ran.code and not ran.problem else ""
        print(f"== {head}{code}")
        sys.stdout.flush()
        output = bytes(ran.output)
        sys.stdout.buffer.write(output + (b"" if output.endswith(b"\n") or not output else b"\n"))
        sys.stdout.buffer.flush()
        if ran.problem:
            print(f"-- {ran.problem}")


def copy(arguments: argparse.Namespace, members: Members) -> int:
    """A file or folder to all hosts."""
    what = source.look(arguments.source, arguments.destination or os.path.abspath(arguments.source))
    if arguments.checksum:
        what = what.with_digests()
    for path in what.skipped:
        print(f"ringdance hosts: {path} is neither file, folder nor link: left out", file=sys.stderr)
    members.connect(arguments.connect_timeout)
    bar = Bar(what.size)

    def say(text: str) -> None:
        bar.end()
        print(f"ringdance hosts: {text}", file=sys.stderr)

    began = time.monotonic()
    copying = Copy(
        members, what, direct=arguments.direct, checksum=arguments.checksum, progress=bar, say=say
    )  # fmt: skip
    try:
        found = copying.run()
    except KeyboardInterrupt:
        say("interrupted; the same command again goes on from here")
        raise
    finally:
        bar.end()
    took = time.monotonic() - began
    if arguments.format == "json":
        print(json.dumps([{"host": host, **vars(one)} for host, one in found.items()], indent=2))
    else:
        print(_summary(found, took))
        _tell({host: one.problem or one.bad[0] for host, one in found.items() if one.failed})
    return int(any(one.failed for one in found.values()))


def _summary(found: Mapping[str, Outcome], took: float) -> str:
    good = [host for host, one in found.items() if not one.failed]
    written = max(one.files for one in found.values())
    there = min(one.there for one in found.values())
    most = max(one.bytes for one in found.values())
    kept = max(one.kept for one in found.values())
    where = f"to {len(good)} of {len(found)} hosts" if len(good) < len(found) else f"to {_hosts(len(found))}"
    words = [f"{written} {'file' if written == 1 else 'files'}, {show.size(most)}, {where} in {took:.1f} s"]
    words += [f"{show.size(most / took)}/s to each"] if most > 10e6 else []
    words += [f"went on after {show.size(kept)} of an earlier copy"] if kept else []
    words += [f"{there} {'was' if there == 1 else 'were'} there already"] if there else []
    return "; ".join(words)


def _hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"


def kill(arguments: argparse.Namespace, members: Members) -> int:
    """End a job's processes."""
    if not re.fullmatch(r"[0-9a-f]{4,32}", arguments.job):
        raise LaunchError(
            f"{arguments.job!r} is no job's name: at least 4 of its digits, as `ringdance hosts list` shows"
        )
    found = _ask(members, arguments, {"chore": "jobs"})
    known = {job for said in found.values() for job in said["jobs"]}
    meant = [job for job in known if job.startswith(arguments.job)]
    if len(meant) > 1:
        raise LaunchError(f"{arguments.job} could be {' or '.join(sorted(meant))}: give more digits")
    if not meant:
        _tell(members.problems)
        others = ", ".join(sorted(job[:8] for job in known)) or "none"
        raise LaunchError(f"no job {arguments.job} runs on {_hosts(len(found))}; jobs there: {others}")
    ended = _again(members, {"chore": "kill", "job": meant[0], "bases": bases(os.environ)})
    for host, said in ended.items():
        count = said["processes"]
        print(f"{host}: {count} process{'es' * (count != 1)} of job {meant[0][:8]} ended")
    _tell(members.problems)
    return int(bool(members.problems))


def disk(arguments: argparse.Namespace, members: Members) -> int:
    """Room in folders."""
    folders = arguments.folders or [os.getcwd(), "/tmp", "/dev/shm"]
    found = _ask(members, arguments, {"chore": "disk", "folders": folders})
    if arguments.format == "json":
        print(json.dumps({host: said["folders"] for host, said in found.items()}, indent=2))
    else:
        rows = [("host", "folder", "size", "free", "used", "")]
        for host, said in found.items():
            rows += [(host, path, *_room(room)) for path, room in said["folders"].items()]
        print("\n".join(table(rows)))
    _tell(members.problems)
    return int(bool(members.problems))


def _room(room: Mapping[str, Any]) -> tuple[str, str, str, str]:
    used = 1.0 - room["free"] / room["total"] if room["total"] else 1.0
    notes = [] if room["exists"] else ["is not there yet"]
    notes += [] if room["writable"] else ["may not be written"]
    notes += ["no room for more files"] if room["inodes_free"] == 0 else []
    return show.size(room["total"]), show.size(room["free"]), f"{used:.0%}", ", ".join(notes)


def learn(arguments: argparse.Namespace, members: Members) -> int:
    """Keys of hosts that are not known yet."""
    hosts = [host for host in members.names if host not in members.reach.local]
    found = trust.look(hosts, members.reach, arguments.connect_timeout)
    for keys in found:
        for kind in keys.known:
            print(f"{keys.host}: {kind} is known")
        for kind, key in keys.new.items():
            print(f"{keys.host}: {kind} is new: {trust.fingerprint(key)}")
        for kind in keys.changed:
            print(f"{keys.host}: {kind} HAS CHANGED")
    wrong = {keys.host: keys.problem for keys in found if keys.problem}
    wrong |= {
        keys.host: f"its key is another than in {keys.file}. If that is right: ssh-keygen -R '{keys.name}'"
        for keys in found
        if keys.changed
    }
    _tell(wrong)
    new = [keys for keys in found if keys.new and not keys.changed]
    if new and (arguments.yes or _confirmed(new)):
        print(f"{trust.learn(new)} keys written to {', '.join(sorted({keys.file for keys in new}))}")
        new = []
    return int(bool(wrong or new))


def _confirmed(new: Sequence[trust.Keys]) -> bool:
    sys.stdout.flush()
    if sys.stdin is None or not sys.stdin.isatty():
        print(
            "ringdance hosts: nothing was written. Compare the fingerprints with those of the hosts "
            "(there: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), then add --yes",
            file=sys.stderr,
        )
        return False
    return input(f"Are these the keys of {_hosts(len(new))}? Write them? [yes/no] ").strip().lower() == "yes"
