"""Calls to AWS by clients of boto3: upload code, wait for a job."""

from __future__ import annotations

import io
import os
import tarfile
import time
from typing import Any

from ringdance.errors import LaunchError, optional
from ringdance.submit.sagemaker.job import NOT_UPLOADED, account_of

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
    return optional("boto3", LaunchError, "AWS needs boto3")


def client(session: Any, service: str, region: str | None = None) -> Any:
    """Make a client that tries again for minutes if AWS throttles it: to wait for a job takes many calls."""
    from botocore.config import Config

    patient = Config(retries={"mode": "standard", "max_attempts": 20})
    return session.client(service, region_name=region, config=patient)


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
    return str(call(client(session, "iam").get_role, RoleName=role)["Role"]["Arn"])


def make_bucket(s3: Any, bucket: str, region: str, account: str) -> None:
    """Create the account's default bucket if it does not exist.

    Raises:
        LaunchError: it exists and belongs to another account, since its name can be guessed; or AWS refuses.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        s3.head_bucket(Bucket=bucket, ExpectedBucketOwner=account)
    except BotoCoreError as error:  # no key, no network, ...
        raise LaunchError(f"AWS: {error}") from None
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("404", "NoSuchBucket"):
            raise LaunchError(
                f"AWS: bucket {bucket} is not account {account}'s, or may not be used: {error}; give "
                "code_location and output_path"
            ) from None
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        call(s3.create_bucket, Bucket=bucket, **where)


def wait(sagemaker: Any, name: str, pause: float = 5.0) -> None:
    """Wait for the job's end and print its status whenever it changes.

    Raises:
        LaunchError: the job failed or was stopped.
    """
    shown = status = ""
    while status not in _ENDED:
        time.sleep(pause if shown else 0.0)
        found = call(sagemaker.describe_training_job, TrainingJobName=name)
        status = found["TrainingJobStatus"]
        now = f"{status}: {found.get('SecondaryStatus', '')}"
        if now != shown:
            print(f"ringdance: {name}: {now}", flush=True)
            shown = now
    if status != "Completed":
        reason = found.get("FailureReason") or "no reason given"
        raise LaunchError(f"training job {name}: {status}: {reason}")
