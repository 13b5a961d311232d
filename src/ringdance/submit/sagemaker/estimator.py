"""Training jobs on SageMaker.

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

from ringdance.errors import ArgumentError, LaunchError
from ringdance.launch.remote.environment import is_secret, shown_text
from ringdance.submit.instances import gpus_of
from ringdance.submit.sagemaker import aws
from ringdance.submit.sagemaker.job import TrainingJob, account_of, job_name
from ringdance.submit.sagemaker.request import Inputs, create_request, mpi_options

KEPT_IN_CLEAR = (
    "holds what looks like a secret, and the service shows it to all who may describe the job. Keep it in "
    "AWS Secrets Manager, and let the script get it by the job's role: "
    "boto3.client('secretsmanager').get_secret_value(SecretId=...)['SecretString']"
)
_RENAMED = {"distributions": "distribution", "image_name": "image_uri"}
_EXAMPLES = {
    "instance_type": "ml.p3.16xlarge",
    "role": "arn:aws:iam::123456789012:role/Training",
    "image_uri": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1",
}

_NO_SERVERS = """\
distribution={'parameter_server': ...} started TensorFlow's parameter servers beside the workers,
which trained asynchronously. Ringdance has no servers: ranks average their gradients by all-reduce, of
embeddings only the rows that were touched. Change the line to
    distribution={'mpi': {'enabled': True, 'processes_per_host': 4}}
and in the script replace ParameterServerStrategy by hvd.DistributedOptimizer. Tables that do not fit one
rank: hvd.EmbeddingTable(..., sharded=True). benchmarks/strategies of a clone measures both ways."""

_NOT_LOCAL = (
    "instance_type {where!r}: jobs run on SageMaker only. Run the script itself on this machine, with its "
    "arguments and the variables it reads (SM_CHANNEL_TRAIN, ...): ringdance run -np {ranks} python {script}"
)
_TAIL = (
    "aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix {name}/ --follow --since 1d "
    "--region {region}"
)
_GPUS_UNKNOWN = (
    "{type}: its number of GPUs is not known here. Give processes_per_host (--processes-per-host): the ranks "
    "of each machine, usually one for each GPU"
)
_NO_IMAGE = (
    "; the SDK looked up an image by it. Give image_uri='ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG', an "
    "image with the script's framework and Ringdance"
)


class Estimator(TrainingJob):
    """A training script, the machines it runs on, and the jobs made of both.

    The arguments are those of the SDK's version 2, and of the service's ``CreateTrainingJob``; the ones with
    a help text are options of ``ringdance sagemaker submit`` too (Note [Options from fields]).

    Args:
        entry_point: the script; a path within `source_dir` if that is given.
        source_dir: directory that is uploaded, or ``s3://...tar.gz`` with its contents.
        processes_per_host: ranks on each machine, as in `distribution`; default: its GPUs, else 1.
        hyperparameters: the script gets them as ``--name value``.
        distribution: ``{"mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x A=1"}}``;
            ``{"mpi": {"enabled": False}}``: each machine runs the script once, by itself.
        base_job_name: jobs' names begin with it; default: the script's name.
        boto_session: a ``boto3.Session``; default: a new one.

    Attributes:
        latest_job: name of the job that `fit` started last.
        started: the machines and how many ranks each has, for messages.

    Raises:
        ArgumentError: an argument is missing, unknown or contradicts another one.
    """

    latest_job: str | None = None

    @functools.wraps(TrainingJob.__init__)  # type: ignore[misc]
    def __init__(self, *arguments: Any, **given: Any) -> None:
        known = {item.name for item in fields(TrainingJob) if item.init}
        for name in given.keys() - known:
            current = _RENAMED.get(name, name.removeprefix("train_"))
            advice = f"; it is called {current} now" if current in known else ""
            advice = _NO_IMAGE if name in ("framework_version", "py_version") else advice
            raise ArgumentError(f"Estimator has no argument {name!r}{advice}")
        super().__init__(*arguments, **{name: value for name, value in given.items() if value is not None})
        self._read_distribution()
        self._check_options()
        self._choose_ranks()

    def _read_distribution(self) -> None:
        """Merge `distribution` with its short forms; `mpi` stays None if neither says whether to use it."""
        distribution = dict(self.distribution or {})
        mpi = dict(distribution.pop("mpi", None) or {})
        if (distribution.pop("parameter_server", None) or {}).get("enabled"):
            raise ArgumentError(_NO_SERVERS)
        if distribution:
            raise ArgumentError(
                f"distribution: only 'mpi' is supported, not {', '.join(sorted(distribution))}"
            )
        if unknown := set(mpi) - {"enabled", "processes_per_host", "custom_mpi_options"}:
            raise ArgumentError(f"distribution['mpi']: {', '.join(sorted(unknown))}: unknown")
        given = self.processes_per_host
        ranks = mpi.get("processes_per_host", given)
        if given is not None and ranks not in (None, given):
            raise ArgumentError(f"processes_per_host is {given}, but in `distribution` it is {ranks}")
        self.processes_per_host = given if ranks is None else ranks
        self.mpi = mpi.get("enabled", True if mpi or given or self.custom_mpi_options else None)
        self.custom_mpi_options, notes = mpi_options(mpi.get("custom_mpi_options") or self.custom_mpi_options)
        for note in notes:
            warnings.warn(f"custom_mpi_options: {note}", stacklevel=3)

    def _choose_ranks(self) -> None:
        """Use MPI with a rank for each GPU, unless that is one process or the job says otherwise."""
        gpus = gpus_of(self.instance_type.removeprefix("ml."))
        if self.mpi is not False and self.processes_per_host is None:
            if gpus is None:
                raise ArgumentError(_GPUS_UNKNOWN.format(type=self.instance_type))
            if self.mpi or self.instance_count * max(gpus, 1) > 1:
                self.mpi, self.processes_per_host = True, max(gpus, 1)
        kind = f"{self.instance_type} ({gpus} GPUs)" if gpus else self.instance_type
        ranks = self.processes_per_host if self.mpi else "1, without MPI"
        self.started = f"{self.instance_count} x {kind}, ranks on each: {ranks}"

    def _check_options(self) -> None:
        if self.instance_type.startswith("local"):
            ranks = self.processes_per_host or 1
            text = _NOT_LOCAL.format(where=self.instance_type, ranks=ranks, script=self.entry_point)
            raise ArgumentError(text)
        uploaded = not self.files.startswith("s3://")
        if uploaded and not os.path.isfile(os.path.join(self.source_dir or "", self.entry_point)):
            where = f"source_dir {self.source_dir!r}" if self.source_dir else os.getcwd()
            raise ArgumentError(f"entry_point {self.entry_point!r}: no such file in {where}")
        for name, example in _EXAMPLES.items():
            if not getattr(self, name):
                raise ArgumentError(f"{name} is missing, for example {example!r}")
        if not self.instance_type.startswith("ml."):
            raise ArgumentError(f"instance_type {self.instance_type!r}: it begins with ml., as ml.c5.xlarge")
        for name in ("instance_count", "processes_per_host"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ArgumentError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.use_spot_instances:
            if self.max_wait is None or self.max_wait < self.max_run:
                raise ArgumentError(
                    f"spot instances: max_wait ({self.max_wait}) is the time for waiting and running "
                    f"together: it must be given, at least max_run ({self.max_run} s)"
                )
            if not self.checkpoint_s3_uri:
                warnings.warn(
                    "spot instances without checkpoint_s3_uri: an interrupted job starts over; give it, "
                    "and let the script resume from /opt/ml/checkpoints",
                    stacklevel=3,
                )
        elif self.max_wait is not None:
            raise ArgumentError(
                f"max_wait ({self.max_wait}) is for spot instances only: give use_spot_instances=True too"
            )
        given = [*(self.environment or {}).items(), *self.hyperparameters.items()]
        in_clear = [name for name, value in given if is_secret(name, str(value))]
        if shown_text(self.custom_mpi_options) != self.custom_mpi_options:
            in_clear.append("custom_mpi_options")
        for name in in_clear:
            warnings.warn(f"{name} {KEPT_IN_CLEAR}", stacklevel=3)
        if bool(self.subnets) != bool(self.security_group_ids):
            raise ArgumentError("subnets and security_group_ids belong together: give both or neither")

    def _new_name(self) -> str:
        return job_name(self.base_job_name or os.path.splitext(os.path.basename(self.entry_point))[0])

    def request(self, inputs: Inputs = None, name: str | None = None) -> dict[str, Any]:
        """Return the arguments of ``create_training_job`` that :meth:`fit` would send; sends nothing.

        Raises:
            ArgumentError: the inputs cannot be used, or the region is unknown.
            LaunchError: the role is no ARN and cannot be looked up here.
        """
        region, account = self._find_region(), account_of(self.role)
        bucket = f"sagemaker-{region}-{account}"
        if not (account or self.code_location):
            raise LaunchError(f"role {self.role!r}: give its ARN, arn:aws:iam::ACCOUNT:role/NAME")
        if self.code_location:
            bucket = self.code_location.removeprefix("s3://").partition("/")[0]
        name = name or self._new_name()
        if not re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
            raise ArgumentError(f"name {name!r}: up to 63 letters, digits and '-', as the service takes it")
        return create_request(self, name, inputs, region, bucket)

    def _find_region(self) -> str:
        given = self.region or getattr(self.boto_session, "region_name", None)
        given = given or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        region = given or self._session().region_name
        if not region:
            raise ArgumentError("no AWS region: give region= (--region), or set AWS_REGION")
        return str(region)

    def _session(self) -> Any:
        if self.boto_session is None:
            self.boto_session = aws.call(aws.boto3().Session, region_name=self.region)
        return self.boto_session

    def fit(
        self, inputs: Inputs = None, wait: bool = True, logs: bool = True, job_name: str | None = None
    ) -> str:
        """Start a job; with `wait` wait for its end.

        Args:
            inputs: channels: a name for each S3 URI or :class:`Input`; a single one is called "training".
            wait: whether to wait for the end.
            logs: whether to print the command that shows the job's output.
            job_name: default: made of `base_job_name` and the time.

        Returns:
            The job's name.

        Raises:
            ArgumentError: the inputs cannot be used.
            LaunchError: AWS refuses, or the job failed: with the service's reason.
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
            print(f"ringdance: its output: {_TAIL.format(name=name, region=region)}", flush=True)
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
    """Return this rank's channel in a script: ``<name>_<local rank>`` where each worker has its own.

    Returns:
        `name` itself where the job has a channel of that name.

    Raises:
        ArgumentError: there is neither.
    """
    channels = json.loads(os.environ.get("SM_CHANNELS", "[]"))
    local_rank = os.environ.get("RINGDANCE_LOCAL_RANK", "0")
    local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", local_rank)
    for found in (name, f"{name}_{local_rank}"):
        if found in channels:
            return found
    raise ArgumentError(
        f"there is no channel {name!r} and no {name}_{local_rank}; there are {', '.join(channels)}"
    )
