"""Calls to AWS by clients of boto3: upload code, wait for a job."""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from typing import Any

from ringdance.errors import LaunchError, optional
from ringdance.submit.sagemaker.job import NOT_UPLOADED, account_of

_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, if they came with one)"
_FIXES = {  # by an error's type and the service's code; the first that matches
    "NoCredentials|PartialCredentials": f"Run `aws configure` or `aws sso login`, or {_KEYS}",
    "InvalidAccessKey|InvalidClientToken|UnrecognizedClient|SignatureDoesNotMatch|AuthFailure": (
        f"The keys are wrong: run `aws configure`, or {_KEYS}"
    ),
    "Expired|Token|SSO|Login": f"Log in again by `aws sso login`, or {_KEYS}",
    "NoRegion": "Give --region, or set AWS_REGION",
    "ProfileNotFound": "`aws configure list-profiles` lists the ones there are, for AWS_PROFILE",
    "Connect|Timeout|Proxy": "Check the region, and this machine's network and proxy (HTTPS_PROXY)",
}
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
    """Make a client; SageMaker's tries again for minutes if AWS throttles it: waiting takes many calls."""
    from botocore.config import Config

    attempts = {"mode": "standard", "max_attempts": 20 if service == "sagemaker" else 4}
    config = Config(retries=attempts, connect_timeout=10)
    return call(session.client, service_name=service, region_name=region, config=config)


def call(function: Any, **arguments: Any) -> Any:
    """Call a client's method, or what makes a client.

    Raises:
        LaunchError: AWS refuses, or cannot be reached; the error that this came from is its ``__cause__``.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return function(**arguments)
    except (BotoCoreError, ClientError) as error:
        what = f"{type(error).__name__} {_code(error)}"
        fix = next((text for pattern, text in _FIXES.items() if re.search(pattern, what)), "")
        raise LaunchError(". ".join(filter(None, (f"AWS: {error}".rstrip("."), fix)))) from error


def _code(error: BaseException | None) -> str:
    """Return the service's code for what it refused, "" for an error of the library."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def role_arn(session: Any, role: str) -> str:
    """Return the ARN of a role given by its name or its ARN.

    Raises:
        LaunchError: it cannot be looked up.
    """
    if account_of(role):
        return role
    try:
        return str(call(client(session, "iam").get_role, RoleName=role)["Role"]["Arn"])
    except LaunchError as error:
        if _code(error.__cause__) not in ("AccessDenied", "NoSuchEntity"):
            raise
        raise LaunchError(f"role {role!r}: {error}. Give its ARN, arn:aws:iam::ACCOUNT:role/NAME") from None


def make_bucket(s3: Any, bucket: str, region: str, account: str) -> None:
    """Create the account's default bucket if it does not exist.

    Raises:
        LaunchError: it exists and belongs to another account, since its name can be guessed; or AWS refuses.
    """
    try:
        # It needs the right that HeadBucket needs, whose refusals have no text.
        call(s3.list_objects_v2, Bucket=bucket, MaxKeys=1, ExpectedBucketOwner=account)
    except LaunchError as error:
        if _code(error.__cause__) == "AccessDenied":
            text = "is not account {}'s, or may not be used: {}. Give code_location and output_path"
            raise LaunchError(f"bucket {bucket} {text.format(account, error)}") from None
        if _code(error.__cause__) != "NoSuchBucket":
            raise
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
