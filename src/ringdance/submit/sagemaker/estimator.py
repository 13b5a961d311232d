"""Start training jobs on SageMaker.

::

    from ringdance.submit.sagemaker import Estimator

    estimator = Estimator(
        entry_point="train.py", source_dir="src", role="arn:aws:iam::123456789012:role/Training",
        image_uri="123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
        instance_type="ml.p3.16xlarge", instance_count=2, processes_per_host=8,
        hyperparameters={"epochs": 90},
    )
    estimator.fit({"train": "s3://bucket/imagenet/train"})
"""

from __future__ import annotations

import functools
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ringdance.errors import ArgumentError, LaunchError, optional
from ringdance.launch.remote.environment import is_secret, shown_text
from ringdance.submit.instances import gpus_of
from ringdance.submit.sagemaker import aws
from ringdance.submit.sagemaker.job import TrainingJob, account_of, job_name
from ringdance.submit.sagemaker.request import Inputs, create_request, mpi_options

KEPT_IN_CLEAR = (
    "holds what looks like a secret, and the service shows it to everyone who may describe the job. Keep it "
    "in AWS Secrets Manager, and let the script read it with the job's role: "
    "boto3.client('secretsmanager').get_secret_value(SecretId=...)['SecretString']"
)
_RENAMED = {"distributions": "distribution", "image_name": "image_uri"}
_EXAMPLES = {
    "instance_type": "ml.p3.16xlarge",
    "role": "arn:aws:iam::123456789012:role/Training",
    "image_uri": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
}

_NO_SERVERS = """\
distribution={'parameter_server': ...} started TensorFlow's parameter servers next to the workers, which
trained asynchronously. Ringdance has no servers. Ranks average their gradients by all-reduce, and for
embeddings only the rows that were used. Change the line to
    distribution={'mpi': {'enabled': True, 'processes_per_host': 4}}
and replace ParameterServerStrategy with hvd.DistributedOptimizer in the script. For tables that do not fit
on one rank, use hvd.EmbeddingTable(..., sharded=True). In a clone of the
repository, benchmarks/strategies measures both."""

_NOT_LOCAL = (
    "instance_type {where!r}: jobs run only on SageMaker. To train on this machine, set the variables that "
    "the script reads (SM_CHANNEL_TRAIN, ...), and start it with ringdance run -np {ranks} python {script}"
)
_TAIL = (
    "aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix {name}/ --follow --since 1d "
    "--region {region}"
)
_GPUS_UNKNOWN = (
    "{type}: this instance type's number of GPUs is unknown. Pass processes_per_host "
    "(--processes-per-host), the number of ranks on each machine, usually one per GPU"
)
_NO_IMAGE = (
    "; the SDK used it to look up an image. Pass image_uri='ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG', "
    "an image with the script's framework and Ringdance"
)


class Estimator(TrainingJob):
    """Starts jobs that run a training script on a given set of machines.

    The arguments have the same names as in version 2 of the SageMaker SDK and in ``CreateTrainingJob``.
    Arguments with a help text are also options of ``ringdance sagemaker submit``.
    See Note [Options from fields].

    Args:
        entry_point: Training script. A path within ``source_dir`` if that is set.
        source_dir: Directory to upload, or the S3 URI of a tar.gz archive of its contents.
        processes_per_host: Number of ranks per machine, as in ``distribution``. Default: one per GPU, or 1
            without GPUs.
        hyperparameters: Arguments of the script, which receives them as ``--name value``.
        distribution: ``{"mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x A=1"}}``.
            With ``{"mpi": {"enabled": False}}``, each machine runs the script once, independently.
        base_job_name: Prefix of the jobs' names. Default: the script's name.
        boto_session: A ``boto3.Session``. Default: a new session.

    Attributes:
        latest_job: Name of the last job that ``fit`` started.
        started: Description of the machines and their ranks, for messages.

    Raises:
        ArgumentError: An argument is missing or unknown, or contradicts another argument.
    """

    latest_job: str | None = None

    @functools.wraps(TrainingJob.__init__)  # type: ignore[misc]
    def __init__(self, *arguments: Any, **given: Any) -> None:
        known = {item.name for item in fields(TrainingJob) if item.init}
        for name in given.keys() - known:
            current = _RENAMED.get(name, name.removeprefix("train_"))
            advice = f"; it is now called {current}" if current in known else ""
            advice = _NO_IMAGE if name in ("framework_version", "py_version") else advice
            raise ArgumentError(f"Estimator has no argument {name!r}{advice}")
        super().__init__(*arguments, **{name: value for name, value in given.items() if value is not None})
        self._read_distribution()
        self._check_options()
        self._choose_ranks()

    def _read_distribution(self) -> None:
        """Merge ``distribution`` with the arguments that are shorthand for its entries.

        ``mpi`` stays None if none of them determines whether to use MPI.
        """
        distribution = dict(self.distribution or {})
        mpi = dict(distribution.pop("mpi", None) or {})
        if (distribution.pop("parameter_server", None) or {}).get("enabled"):
            raise ArgumentError(_NO_SERVERS)
        if distribution:
            raise ArgumentError(
                f"distribution: only 'mpi' is supported, not {', '.join(sorted(distribution))}"
            )
        if unknown := set(mpi) - {"enabled", "processes_per_host", "custom_mpi_options"}:
            raise ArgumentError(f"distribution['mpi'] has unknown keys: {', '.join(sorted(unknown))}")
        argument = self.processes_per_host
        ranks = mpi.get("processes_per_host", argument)
        if argument is not None and ranks not in (None, argument):
            raise ArgumentError(f"processes_per_host is {argument}, but distribution sets it to {ranks}")
        self.processes_per_host = argument if ranks is None else ranks
        self.mpi = mpi.get("enabled", True if mpi or argument or self.custom_mpi_options else None)
        self.custom_mpi_options, notes = mpi_options(mpi.get("custom_mpi_options") or self.custom_mpi_options)
        for note in notes:
            warnings.warn(f"custom_mpi_options: {note}", stacklevel=3)

    def _choose_ranks(self) -> None:
        """Use MPI with one rank per GPU, unless the job specifies otherwise or would have only one rank."""
        gpus = gpus_of(self.instance_type.removeprefix("ml."))
        if self.mpi is not False and self.processes_per_host is None:
            if gpus is None:
                raise ArgumentError(_GPUS_UNKNOWN.format(type=self.instance_type))
            if self.mpi or self.instance_count * max(gpus, 1) > 1:
                self.mpi, self.processes_per_host = True, max(gpus, 1)
        kind = f"{self.instance_type} ({gpus} GPUs)" if gpus else self.instance_type
        count = (self.processes_per_host or 1) if self.mpi else 1
        ranks = f"{count} rank{'s' * (count != 1)} per instance{'' if self.mpi else ', without MPI'}"
        self.started = f"{self.instance_count} x {kind}, {ranks}"

    def _check_options(self) -> None:
        if self.instance_type.startswith("local"):
            ranks = self.processes_per_host or 1
            text = _NOT_LOCAL.format(where=self.instance_type, ranks=ranks, script=self.entry_point)
            raise ArgumentError(text)
        uploaded = not self.files.startswith("s3://")
        if uploaded and not os.path.isfile(os.path.join(self.source_dir or "", self.entry_point)):
            where = f"source_dir {self.source_dir!r}" if self.source_dir else os.getcwd()
            raise ArgumentError(f"entry_point {self.entry_point!r} does not exist in {where}")
        for name, example in _EXAMPLES.items():
            if not getattr(self, name):
                raise ArgumentError(f"{name} is missing. Pass, for example, {example!r}.")
        if not self.instance_type.startswith("ml."):
            raise ArgumentError(f"instance_type {self.instance_type!r} must start with 'ml.'")
        for name in ("instance_count", "processes_per_host"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.use_spot_instances:
            if self.max_wait is None or self.max_wait < self.max_run:
                raise ArgumentError(
                    f"max_wait ({self.max_wait} s) must be at least max_run ({self.max_run} s), because it "
                    "covers both waiting for spot instances and running the job."
                )
            if not self.checkpoint_s3_uri:
                warnings.warn(
                    "checkpoint_s3_uri is not set, so an interrupted job on spot instances starts from the "
                    "beginning. Set it, and let the script resume from /opt/ml/checkpoints.",
                    stacklevel=3,
                )
        elif self.max_wait is not None:
            raise ArgumentError(
                f"max_wait ({self.max_wait}) applies only to spot instances. Pass use_spot_instances=True."
            )
        sent = [*(self.environment or {}).items(), *self.hyperparameters.items()]
        in_clear = [name for name, value in sent if is_secret(name, str(value))]
        if shown_text(self.custom_mpi_options) != self.custom_mpi_options:
            in_clear.append("custom_mpi_options")
        for name in in_clear:
            warnings.warn(f"{name} {KEPT_IN_CLEAR}", stacklevel=3)
        if bool(self.subnets) != bool(self.security_group_ids):
            raise ArgumentError("subnets and security_group_ids require each other. Pass both or neither.")

    def _new_name(self) -> str:
        return job_name(self.base_job_name or os.path.splitext(os.path.basename(self.entry_point))[0])

    def request(self, inputs: Inputs = None, name: str | None = None) -> dict[str, Any]:
        """Return the arguments of ``create_training_job`` that ``fit`` would send. Sends nothing.

        Raises:
            ArgumentError: The inputs cannot be used, or the region is unknown.
            LaunchError: ``code_location`` is not set, and the default bucket's account is unknown, because
                ``role`` is not an ARN. This method does not look up roles.
        """
        region, account = self._find_region(), account_of(self.role)
        bucket = f"sagemaker-{region}-{account}"
        if not (account or self.code_location):
            raise LaunchError(f"role {self.role!r} is not an ARN. Pass arn:aws:iam::ACCOUNT:role/NAME.")
        if self.code_location:
            bucket = self.code_location.removeprefix("s3://").partition("/")[0]
        name = name or self._new_name()
        if not re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
            raise ArgumentError(f"{name!r} is not a valid job name of up to 63 letters, digits and '-'")
        return create_request(self, name, inputs, region, bucket)

    def _find_region(self) -> str:
        known = self.region or getattr(self.boto_session, "region_name", None)
        known = known or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        region = known or self._session().region_name
        if not region:
            raise ArgumentError("the AWS region is unknown. Pass region= (--region) or set AWS_REGION.")
        return str(region)

    def _session(self) -> Any:
        if self.boto_session is None:
            boto3 = optional("boto3", LaunchError, "AWS needs boto3")
            self.boto_session = aws.call(boto3.Session, region_name=self.region)
        return self.boto_session

    def fit(
        self, inputs: Inputs = None, wait: bool = True, logs: bool = True, job_name: str | None = None
    ) -> str:
        """Start a job, and wait for it to end if ``wait`` is True.

        Args:
            inputs: The job's channels: a mapping from names to S3 URIs or ``Input`` objects. A single value
                becomes the channel "training".
            wait: If True, wait for the job to end.
            logs: If True, print the command that shows the job's output.
            job_name: Name of the job. Default: ``base_job_name``, followed by the current time.

        Returns:
            The job's name.

        Raises:
            ArgumentError: The inputs cannot be used.
            LaunchError: AWS rejects a request, or the job failed. The message contains the service's reason.
        """
        name = job_name or self._new_name()
        session, region = self._session(), self._find_region()
        self.role = aws.role_arn(session, self.role)
        request = self.request(inputs, name)
        self._upload(request, aws.client(session, "s3", region), region)
        sagemaker = aws.client(session, "sagemaker", region)
        aws.call(sagemaker.create_training_job, **request)
        self.latest_job = name
        print(f"ringdance: training job {name} in {region}; {self.started}", flush=True)
        if logs:
            print(f"ringdance: to see its output: {_TAIL.format(name=name, region=region)}", flush=True)
        if wait:
            aws.wait(sagemaker, name)
        return name

    def _upload(self, request: Mapping[str, Any], s3: Any, region: str) -> None:
        if self.files.startswith("s3://"):
            return
        target = json.loads(request["HyperParameters"]["sagemaker_submit_directory"])
        bucket, _, key = target.removeprefix("s3://").partition("/")
        owner = {} if self.code_location else {"ExpectedBucketOwner": account_of(self.role)}
        if owner:
            aws.make_bucket(s3, bucket, region, account_of(self.role))
        aws.call(s3.put_object, Bucket=bucket, Key=key, Body=aws.pack(self.files), **owner)


def worker_channel(name: str) -> str:
    """Return the name of this rank's channel. Called by the training script.

    Returns:
        ``name`` if the job has a channel with that name, otherwise ``<name>_<local rank>``, which exists if
        each worker has its own channel.

    Raises:
        ArgumentError: The job has neither channel.
    """
    channels = json.loads(os.environ.get("SM_CHANNELS", "[]"))
    local_rank = os.environ.get("RINGDANCE_LOCAL_RANK", "0")
    local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)
    for candidate in (name, f"{name}_{local_rank}"):
        if candidate in channels:
            return candidate
    raise ArgumentError(
        f"there is no channel {name!r} or {name}_{local_rank}. The channels are {', '.join(channels)}"
    )
