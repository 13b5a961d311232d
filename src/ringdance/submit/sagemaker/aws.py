"""Call AWS through boto3 clients: upload code and wait for a job."""

from __future__ import annotations

import io
import os
import re
import tarfile
import time
from typing import Any

from ringdance.errors import LaunchError
from ringdance.submit.sagemaker.job import NOT_UPLOADED, account_of

_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN, if they came with one)"
_FIXES = {  # keys: patterns for "<error type> <error code>"; the first match applies
    "NoCredentials|PartialCredentials": f"Run `aws configure` or `aws sso login`, or {_KEYS}",
    "InvalidAccessKey|InvalidClientToken|UnrecognizedClient|SignatureDoesNotMatch|AuthFailure": (
        f"The keys are wrong: run `aws configure`, or {_KEYS}"
    ),
    "Expired|Token|SSO|Login": f"Log in again with `aws sso login`, or {_KEYS}",
    "NoRegion": "Pass --region or set AWS_REGION",
    "ProfileNotFound": "Set AWS_PROFILE to a profile that `aws configure list-profiles` lists",
    "Connect|Timeout|Proxy": "Check the region, and this machine's network and proxy (HTTPS_PROXY)",
}
_ENDED = ("Completed", "Failed", "Stopped")


def pack(files: str) -> bytes:
    """Pack a file or a directory's contents as a tar.gz archive, with sorted names and without owners."""
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


def client(session: Any, service: str, region: str | None = None) -> Any:
    """Create a client for a service.

    Waiting for a job takes many calls, so the SageMaker client retries for several minutes if AWS
    throttles it.
    """
    from botocore.config import Config

    attempts = {"mode": "standard", "max_attempts": 20 if service == "sagemaker" else 4}
    config = Config(retries=attempts, connect_timeout=10)
    return call(session.client, service_name=service, region_name=region, config=config)


def call(function: Any, **arguments: Any) -> Any:
    """Call a client's method, or a function that creates a client or session.

    Raises:
        LaunchError: AWS rejects the request or cannot be reached. ``__cause__`` is the original error.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return function(**arguments)
    except (BotoCoreError, ClientError) as error:
        what = f"{type(error).__name__} {_code(error)}"
        fix = next((text for pattern, text in _FIXES.items() if re.search(pattern, what)), "")
        raise LaunchError(". ".join(filter(None, (f"AWS: {error}".rstrip("."), fix)))) from error


def _code(error: BaseException | None) -> str:
    """Return the service's error code, or an empty string if the error did not come from the service."""
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def role_arn(session: Any, role: str) -> str:
    """Return a role's ARN.

    Args:
        session: ``boto3.Session`` for the lookup.
        role: Name or ARN.

    Raises:
        LaunchError: The role cannot be looked up.
    """
    if account_of(role):
        return role
    try:
        return str(call(client(session, "iam").get_role, RoleName=role)["Role"]["Arn"])
    except LaunchError as error:
        if _code(error.__cause__) not in ("AccessDenied", "NoSuchEntity"):
            raise
        raise LaunchError(f"role {role!r}: {error}. Pass its ARN, arn:aws:iam::ACCOUNT:role/NAME.") from None


def make_bucket(s3: Any, bucket: str, region: str, account: str) -> None:
    """Create the account's default bucket if it does not exist.

    Raises:
        LaunchError: AWS rejects a request, or the bucket belongs to another account. The latter is possible
            because the bucket's name is predictable.
    """
    try:
        # This call needs the same permission as HeadBucket, but its errors include a message.
        call(s3.list_objects_v2, Bucket=bucket, MaxKeys=1, ExpectedBucketOwner=account)
    except LaunchError as error:
        if _code(error.__cause__) == "AccessDenied":
            text = "does not belong to account {}, or denies access: {}. Pass code_location and output_path"
            raise LaunchError(f"bucket {bucket} {text.format(account, error)}") from None
        if _code(error.__cause__) != "NoSuchBucket":
            raise
        where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        call(s3.create_bucket, Bucket=bucket, **where)


def wait(sagemaker: Any, name: str, pause: float = 5.0) -> None:
    """Wait until the job has ended. Prints its status whenever it changes.

    Args:
        sagemaker: SageMaker client.
        name: Name of the job.
        pause: Seconds between queries.

    Raises:
        LaunchError: The job failed or was stopped.
    """
    shown = status = ""
    while status not in _ENDED:
        time.sleep(pause if shown else 0.0)
        job = call(sagemaker.describe_training_job, TrainingJobName=name)
        status = job["TrainingJobStatus"]
        now = f"{status}: {job.get('SecondaryStatus', '')}"
        if now != shown:
            print(f"ringdance: {name}: {now}", flush=True)
            shown = now
    if status != "Completed":
        reason = job.get("FailureReason") or "no reason given"
        raise LaunchError(f"training job {name}: {status}: {reason}")
