"""``ringdance ec2 hostfile``: write a host file of running instances, with slots by instance type."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from ringdance import subcommands
from ringdance.errors import LaunchError
from ringdance.submit.options import pairs
from ringdance.submit.sagemaker import aws

_EXAMPLES = """\
examples:
  ringdance ec2 hostfile --tag job=resnet > hosts
  ringdance run --hostfile hosts python train.py
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance ec2`` with the words after it; returns the exit code."""
    hostfile = subcommands.Subcommand(
        _hostfile, "write a host file of running instances with a tag", _add_arguments, _EXAMPLES
    )
    return subcommands.run("ringdance ec2", "Hosts on Amazon EC2.", {"hostfile": hostfile}, argv)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tag", action="append", required=True, metavar="KEY=VALUE", help="with several, all must match")
    add("--region", help="default: that of boto3's configuration")


def _hostfile(arguments: argparse.Namespace) -> int:
    for address, slots, kind in hosts(pairs("--tag", arguments.tag), arguments.region):
        print(f"{address} slots={slots}  # {kind}")
    return 0


def hosts(tags: Mapping[str, str], region: str | None = None) -> list[tuple[str, int, str]]:
    """List running instances: private address, slots, instance type; in the order of their launch.

    A slot is a GPU; where the type has none, a core.

    Args:
        tags: keys and values that an instance must have.
        region: default: that of boto3's configuration.

    Raises:
        LaunchError: boto3 is missing, AWS refuses, or there is no such instance.
    """
    filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]
    filters.append({"Name": "instance-state-name", "Values": ["running"]})
    client = aws.call(aws.boto3().client, service_name="ec2", region_name=region)
    reservations = _all(client, "describe_instances", "Reservations", Filters=filters)
    found = [item for group in reservations for item in group["Instances"]]
    if not found:
        wanted = ", ".join(f"{key}={value}" for key, value in tags.items())
        raise LaunchError(f"no running instance in {client.meta.region_name} has the tag {wanted}")
    kinds = sorted({item["InstanceType"] for item in found})
    types = _all(client, "describe_instance_types", "InstanceTypes", InstanceTypes=kinds)
    slots = {kind["InstanceType"]: _slots(kind) for kind in types}
    found.sort(key=lambda item: (item["LaunchTime"], item.get("AmiLaunchIndex", 0), item["InstanceId"]))
    return [(item["PrivateIpAddress"], slots[item["InstanceType"]], item["InstanceType"]) for item in found]


def _all(client: Any, method: str, key: str, **arguments: Any) -> list[dict[str, Any]]:
    """Return what is below `key` of all pages of an answer."""
    pages = aws.call(client.get_paginator(method).paginate(**arguments).build_full_result)
    found: list[dict[str, Any]] = pages[key]
    return found


def _slots(kind: dict[str, Any]) -> int:
    gpus = sum(int(gpu["Count"]) for gpu in kind.get("GpuInfo", {}).get("Gpus", []))
    return gpus or int(kind["VCpuInfo"].get("DefaultCores") or kind["VCpuInfo"]["DefaultVCpus"])
