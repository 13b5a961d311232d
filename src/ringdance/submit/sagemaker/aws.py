"""Calls to AWS by clients of boto3: upload code, follow a job."""

from __future__ import annotations

import io
import os
import tarfile
import time
from typing import Any

from ringdance.errors import LaunchError, pip_install
from ringdance.submit.sagemaker.job import NOT_UPLOADED, account_of

_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_ENDED = ("Completed", "Failed", "Stopped")


def pack(files: str) -> bytes:
    """Pack a directory's contents, or a single file, as a tar.gz with sorted names and no owners."""
    buffer = io.BytesIO()

    def plain(item: tarfile.TarInfo) -> tarfile.TarInfo | None:
        item.uid = item.gid = 0
        item.uname = item.gname = ""
        return None if os.path.basename(item.name) in NOT_UPLOADED else item

    base, names = (files, sorted(os.listdir(files))) if os.path.isdir(files) else os.path.split(files)
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in [names] if isinstance(names, str) else names:
            archive.add(os.path.join(base, name), arcname=name, filter=plain)
    return buffer.getvalue()


def boto3() -> Any:
    """Import AWS's library.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        import boto3
    except ImportError:
        raise LaunchError(f"AWS needs boto3: {pip_install('boto3')}") from None
    return boto3


def call(function: Any, **arguments: Any) -> Any:
    """Call a client's method.

    Raises:
        LaunchError: AWS refuses, or cannot be reached.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return function(**arguments)
    except (BotoCoreError, ClientError) as error:
        raise LaunchError(f"AWS: {error}") from None


def role_arn(session: Any, role: str) -> str:
    """Return the ARN of a role given by its name or its ARN."""
    if account_of(role):
        return role
    return str(call(session.client("iam").get_role, RoleName=role)["Role"]["Arn"])


def make_bucket(client: Any, bucket: str, region: str) -> None:
    """Create the account's default bucket if it does not exist."""
    from botocore.exceptions import ClientError

    try:
        client.head_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("404", "NoSuchBucket"):
            raise LaunchError(f"AWS: bucket {bucket}: {error}; give code_location and output_path") from None
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        call(client.create_bucket, Bucket=bucket, **where)


def follow(logs: Any, client: Any, name: str, pause: float = 5.0) -> None:
    """Wait for the job's end; show its hosts' output if `logs` (a client) is given.

    Raises:
        LaunchError: the job failed or was stopped.
    """
    seen: dict[str, str | None] = {}
    shown = status = ""
    while status not in _ENDED:
        time.sleep(pause if shown else 0.0)
        found = call(client.describe_training_job, TrainingJobName=name)
        status = found["TrainingJobStatus"]
        now = f"{status}: {found.get('SecondaryStatus', '')}"
        if now != shown:
            print(f"ringdance: {name}: {now}", flush=True)
            shown = now
        if logs is not None:
            _show(logs, name, seen)
    if status != "Completed":
        reason = found.get("FailureReason") or "no reason given"
        raise LaunchError(f"training job {name}: {status}: {reason}")


def _show(logs: Any, name: str, seen: dict[str, str | None]) -> None:
    """Print new events; `seen` keeps each host's position in its stream."""
    from botocore.exceptions import ClientError

    try:
        pages = logs.get_paginator("describe_log_streams").paginate(
            logGroupName=_LOG_GROUP, logStreamNamePrefix=f"{name}/"
        )
        for page in pages:
            for stream in page["logStreams"]:
                seen.setdefault(stream["logStreamName"], None)
    except ClientError:  # there is no group before an account's first job prints
        return
    for stream_name, token in list(seen.items()):
        host = stream_name.rpartition("/")[2].rpartition("-")[0]  # <job>/algo-1-<time>
        while True:
            start = {"nextToken": token} if token else {"startFromHead": True}
            page = call(logs.get_log_events, logGroupName=_LOG_GROUP, logStreamName=stream_name, **start)
            for event in page["events"]:
                print(f"[{host}] {event['message'].rstrip()}", flush=True)
            if page["nextForwardToken"] == token:
                break
            token = page["nextForwardToken"]
        seen[stream_name] = token
