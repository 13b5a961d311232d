"""``ringdance ec2 hostfile``: running instances with a tag as a host file, with slots by instance type."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser
from ringdance.launch.spec import as_program

_DESCRIPTION = "Running EC2 instances with a tag, as a host file of their private addresses."
_EXAMPLES = """\
examples:
  ringdance ec2 hostfile --tag job=resnet > hosts
  ringdance run --hostfile hosts python train.py
"""


def main(argv: Sequence[str]) -> int:
    """``ringdance ec2``: `argv` without the program and ``ec2``; returns the exit code."""
    return as_program("ringdance ec2", lambda: _main(_parser().parse_args(list(argv))))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ringdance ec2", description="Hosts on Amazon EC2.")
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")
    add = commands.add_parser(
        "hostfile",
        help="write a host file",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).add_argument
    add("--tag", action="append", required=True, metavar="KEY=VALUE", help="all that are given must match")
    add("--region", help="default: that of boto3's configuration")
    add("--slots", choices=("gpus", "cores", "vcpus"), help="default: GPUs, where a type has none its cores")
    return parser


def _main(arguments: argparse.Namespace) -> int:
    tags = []
    for text in arguments.tag:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise LaunchError(f"--tag {text}: write KEY=VALUE")
        tags.append((key, value))
    for address, slots, kind in hosts(tags, arguments.region, arguments.slots):
        print(f"{address} slots={slots}  # {kind}")
    return 0


def hosts(
    tags: Iterable[tuple[str, str]], region: str | None = None, count: str | None = None
) -> list[tuple[str, int, str]]:
    """Running instances that have all the tags: private address, slots, instance type; in order of launch.

    Args:
        tags: keys and values.
        region: default: that of boto3's configuration.
        count: what a slot is: "gpus", "cores" or "vcpus"; None: GPUs where the type has some, else cores.

    Raises:
        LaunchError: boto3 is missing, AWS refuses, or there is no such instance.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise LaunchError("EC2 needs boto3: pip install 'ringdance[sagemaker]'") from None
    tags = list(tags)
    filters = [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags]
    filters.append({"Name": "instance-state-name", "Values": ["running"]})
    try:
        client = boto3.client("ec2", region_name=region)
        pages = client.get_paginator("describe_instances").paginate(Filters=filters)
        found = [item for page in pages for group in page["Reservations"] for item in group["Instances"]]
        if not found:
            wanted = ", ".join(f"{key}={value}" for key, value in tags)
            raise LaunchError(f"no running instance in {client.meta.region_name} has the tag {wanted}")
        kinds = sorted({item["InstanceType"] for item in found})
        pages = client.get_paginator("describe_instance_types").paginate(InstanceTypes=kinds)
        slots = {
            kind["InstanceType"]: _slots(kind, count) for page in pages for kind in page["InstanceTypes"]
        }
    except (BotoCoreError, ClientError) as error:
        raise LaunchError(f"AWS: {error}") from None
    found.sort(key=lambda item: (item["LaunchTime"], item.get("AmiLaunchIndex", 0), item["InstanceId"]))
    return [(item["PrivateIpAddress"], slots[item["InstanceType"]], item["InstanceType"]) for item in found]


def _slots(kind: dict[str, Any], count: str | None) -> int:
    gpus = sum(int(gpu["Count"]) for gpu in kind.get("GpuInfo", {}).get("Gpus", []))
    processors = kind["VCpuInfo"]
    cores = int(processors.get("DefaultCores") or processors["DefaultVCpus"])
    if count == "gpus" and not gpus:
        raise LaunchError(f"instance type {kind['InstanceType']} has no GPU; take --slots cores")
    return {None: gpus or cores, "gpus": gpus, "cores": cores, "vcpus": int(processors["DefaultVCpus"])}[
        count
    ]
