"""Host files of EC2 instances, from a stand-in for the service."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from ringdance import cli
from ringdance.submit.ec2 import hosts

boto3 = pytest.importorskip("boto3")
moto = pytest.importorskip("moto")


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with moto.mock_aws():
        yield boto3.client("ec2")


def start(ec2: Any, kind: str, number: int = 1, **tags: str) -> list[dict[str, Any]]:
    specification = {"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}
    image = ec2.describe_images()["Images"][0]["ImageId"]
    made = ec2.run_instances(
        ImageId=image, MinCount=number, MaxCount=number, InstanceType=kind, TagSpecifications=[specification]
    )
    return made["Instances"]


def message(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_private_addresses_and_slots_by_type(ec2: Any, capsys: Any) -> None:
    first = start(ec2, "p4d.24xlarge", 2, job="resnet", stage="a")
    (second,) = start(ec2, "c5.4xlarge", job="resnet")
    start(ec2, "c5.4xlarge", job="other")
    (stopped,) = start(ec2, "c5.4xlarge", job="resnet")
    ec2.stop_instances(InstanceIds=[stopped["InstanceId"]])
    assert cli.main(["ec2", "hostfile", "--tag", "job=resnet"]) == 0
    lines = [re.fullmatch(r"([\d.]+) slots=(\d+)  # \w+\.\w+", line) for line in message(capsys).splitlines()]
    found = {line[1]: int(line[2]) for line in lines if line}
    assert len(found) == len(lines)
    assert found == {item["PrivateIpAddress"]: 8 for item in first} | {second["PrivateIpAddress"]: 8}
    assert {slots for _, slots, _ in hosts({"job": "resnet", "stage": "a"})} == {8}


def test_what_is_not_there(ec2: Any, capsys: Any) -> None:
    assert cli.main(["ec2", "hostfile", "--tag", "job=none"]) == 2
    assert "no running instance in us-east-1 has the tag job=none" in capsys.readouterr().err
    assert cli.main(["ec2", "hostfile", "--tag", "job"]) == 2
