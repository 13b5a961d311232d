"""Training jobs on SageMaker, on boto3 alone; ``instance_type="local"`` runs the container's steps here.

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

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from ringdance.errors import ArgumentError, LaunchError
from ringdance.submit.sagemaker.aws import arn, call, follow, make_bucket, pack
from ringdance.submit.sagemaker.request import (
    FIELDS,
    OUTPUT_FOLDER,
    Input,
    Inputs,
    Job,
    account_of,
    mpi_options,
    program,
)
from ringdance.submit.sagemaker.request import job_name as new_job_name

__all__ = ["Estimator", "Input", "worker_channel"]

_RENAMED = {
    "distributions": "distribution",
    "train_instance_type": "instance_type",
    "train_instance_count": "instance_count",
    "train_max_run": "max_run",
    "train_max_wait": "max_wait",
    "train_use_spot_instances": "use_spot_instances",
    "train_volume_size": "volume_size",
    "train_volume_kms_key": "volume_kms_key",
    "image_name": "image_uri",
}
_LOCAL = ("local", "local_gpu")
_IGNORED = (
    "framework_version",
    "py_version",
    "sagemaker_session",
    "dependencies",
    "disable_sagemaker_metrics",
)


class Estimator:
    """A training script, the machines it is to run on, and the jobs made of both.

    Args:
        entry_point: the script; a path within `source_dir` if that is given.
        source_dir: folder that is sent along, or ``s3://...tar.gz`` that holds it.
        role: ARN of the role that the job has.
        instance_type: such as "ml.p3.16xlarge"; "local" for this machine.
        instance_count: number of machines.
        processes_per_host: ranks on each; the short form of `distribution`.
        hyperparameters: the script gets them as ``--name value``.
        distribution: ``{"mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x A=1"}}``.
        image_uri: container image, with an MPI and the package sagemaker-training.
        base_job_name: jobs' names begin with it; default: the script's name.
        region: default: that of boto3's configuration.
        boto_session: a ``boto3.Session``; default: a new one.
        timeline, autotune_log: whether the job writes these into the output that is uploaded at its end.
        **more: `output_path`, `code_location`, `volume_size` (GB, 30), `volume_kms_key`, `output_kms_key`,
            `max_run` (seconds, one day), `input_mode` ("File", "Pipe", "FastFile"), `use_spot_instances`,
            `max_wait`, `checkpoint_s3_uri`, `checkpoint_local_path`, `metric_definitions`, `environment`,
            `tags`, `subnets`, `security_group_ids`, `encrypt_inter_container_traffic`,
            `enable_network_isolation`, `keep_alive_period_in_seconds`, `max_retry_attempts`,
            `container_log_level`, `model_dir`, `enable_sagemaker_metrics`, `debugger_hook`,
            `disable_profiler`: as of the service. Names of older SDKs, such as `train_instance_type`, are
            accepted with a warning.

    Attributes:
        latest_job: name of the job that `fit` started last.

    Raises:
        ArgumentError: an argument is missing, unknown or contradicts another one.
    """

    def __init__(
        self,
        entry_point: str,
        source_dir: str | None = None,
        role: str = "",
        instance_type: str = "",
        instance_count: int | None = None,
        processes_per_host: int | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        distribution: Mapping[str, Any] | None = None,
        image_uri: str = "",
        *,
        base_job_name: str | None = None,
        region: str | None = None,
        boto_session: Any = None,
        timeline: bool = False,
        autotune_log: bool = False,
        **more: Any,
    ) -> None:
        given: dict[str, Any] = {
            "role": role, "instance_type": instance_type, "instance_count": instance_count,
            "distribution": distribution, "image_uri": image_uri,
        }  # fmt: skip
        options = _new_names({**{k: v for k, v in given.items() if v not in (None, "")}, **more})
        self._base = base_job_name or os.path.splitext(os.path.basename(entry_point))[0]
        self._session, self._region = boto_session, region
        self.latest_job: str | None = None
        self.local = options.get("instance_type") in _LOCAL
        self._distribution = _mpi(options.pop("distribution", None), processes_per_host)
        self._options = {
            "entry_point": program(entry_point, source_dir),
            "source_dir": source_dir,
            "role": "",
            "image_uri": "",
            "instance_count": 1,
            "hyperparameters": dict(hyperparameters or {}),
            **options,
        }
        self._files = source_dir or entry_point
        self._check()
        self._add_logs(timeline, autotune_log)

    def _check(self) -> None:
        options = self._options
        for name, example in (
            ("instance_type", "ml.p3.16xlarge"),
            ("role", "arn:aws:iam::123456789012:role/Training"),
            ("image_uri", "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1"),
        ):
            if not options.get(name) and not (self.local and name != "instance_type"):
                raise ArgumentError(f"{name} is missing, for example {example!r}")
        if options["instance_count"] < 1:
            raise ArgumentError(f"instance_count {options['instance_count']}: it must be 1 or more")
        run, wait = options.get("max_run", Job.max_run), options.get("max_wait")
        if options.get("use_spot_instances"):
            if wait is None or wait < run:
                raise ArgumentError(
                    f"spot instances: max_wait ({wait}) is the time for waiting and running together: it "
                    f"must be given, at least max_run ({run} s)"
                )
            if not options.get("checkpoint_s3_uri"):
                warnings.warn(
                    "spot instances without checkpoint_s3_uri: an interrupted job begins anew; give it, "
                    "and let the script go on from /opt/ml/checkpoints",
                    stacklevel=3,
                )
        elif wait is not None:
            raise ArgumentError(
                f"max_wait ({wait}) is for spot instances only: give use_spot_instances=True too"
            )
        if bool(options.get("subnets")) != bool(options.get("security_group_ids")):
            raise ArgumentError("subnets and security_group_ids belong together: give both or neither")

    def _add_logs(self, timeline: bool, autotune_log: bool) -> None:
        names = {}
        if timeline:
            names["RINGDANCE_TIMELINE"] = f"{OUTPUT_FOLDER}/timeline.json"
        if autotune_log:
            names |= {"RINGDANCE_AUTOTUNE": "1", "RINGDANCE_AUTOTUNE_LOG": f"{OUTPUT_FOLDER}/autotune.csv"}
        if names:
            self._options["environment"] = {**names, **(self._options.get("environment") or {})}
            options = [self._distribution["custom_mpi_options"], *(f"-x {name}" for name in names)]
            self._distribution["custom_mpi_options"] = " ".join(filter(None, options))

    # --- what would be sent ----------------------------------------------------------------------------

    def request(self, inputs: Inputs = None, name: str | None = None) -> dict[str, Any]:
        """The arguments of ``create_training_job`` that :meth:`fit` would send; sends nothing.

        Raises:
            ArgumentError: the inputs cannot be used, or the region is not known.
            LaunchError: the role is no ARN and cannot be looked up here.
        """
        job = self._job(self._options["role"])
        return self._encoded(job, name or new_job_name(self._base), inputs)

    def _encoded(self, job: Job, name: str, inputs: Inputs) -> dict[str, Any]:
        request = job.request(name, inputs)
        if not self._distribution["given"]:
            request["HyperParameters"].pop("sagemaker_mpi_enabled", None)
        return request

    def _job(self, role: str) -> Job:
        account = account_of(role)
        bucket = ""
        region = self._find_region()
        location = self._options.get("code_location")
        if location:
            bucket = location.removeprefix("s3://").partition("/")[0]
        elif account:
            bucket = f"sagemaker-{region}-{account}"
        elif not self.local:
            raise LaunchError(f"role {role!r}: give its ARN, arn:aws:iam::ACCOUNT:role/NAME")
        return Job(
            **{**self._options, "role": role},
            processes_per_host=self._distribution["processes_per_host"],
            custom_mpi_options=self._distribution["custom_mpi_options"],
            mpi=self._distribution["enabled"],
            region=region,
            bucket=bucket,
        )

    def _find_region(self) -> str:
        region = self._region or (self._session and self._session.region_name)
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if not region and self.local:
            return "local"
        if not region:
            region = self._boto().region_name
        if not region:
            raise ArgumentError("the region is not known: give region=, or set AWS_REGION")
        return str(region)

    def _boto(self) -> Any:
        if self._session is None:
            try:
                import boto3
            except ImportError:
                raise LaunchError("SageMaker needs boto3: pip install 'ringdance[sagemaker]'") from None
            self._session = boto3.Session(region_name=self._region)
        return self._session

    # --- a job -----------------------------------------------------------------------------------------

    def fit(
        self, inputs: Inputs = None, wait: bool = True, logs: bool = True, job_name: str | None = None
    ) -> str:
        """Start a job; with `wait` stay until it has ended, with `logs` show its output meanwhile.

        Args:
            inputs: channels: a name for each S3 URI or :class:`Input`; a single one is called "training".
            wait: whether to wait for the end.
            logs: whether to show what the job prints, with the host before each line.
            job_name: default: made of `base_job_name` and the time.

        Returns:
            The job's name.

        Raises:
            ArgumentError: the inputs cannot be used.
            LaunchError: AWS refuses, or the job failed: with the service's reason.
        """
        name = job_name or new_job_name(self._base)
        if self.local:
            from ringdance.submit.sagemaker.local import run

            self.latest_job = name
            run(self._job(""), self._files, name, inputs, self._distribution["given"])
            return name
        session = self._boto()
        region = self._find_region()
        job = self._job(arn(session, self._options["role"]))
        request = self._encoded(job, name, inputs)
        self._upload(job, name, region)
        client = session.client("sagemaker", region_name=region)
        call(client.create_training_job, **request)
        self.latest_job = name
        print(f"ringdance: training job {name} in {region}", flush=True)
        if wait:
            follow(session.client("logs", region_name=region) if logs else None, client, name)
        return name

    @property
    def model_data(self) -> str:
        """Where the latest job's model lies.

        Raises:
            LaunchError: there is no job, or AWS refuses.
        """
        if self.latest_job is None or self.local:
            raise LaunchError("there is no job on SageMaker: call fit() first")
        client = self._boto().client("sagemaker", region_name=self._find_region())
        found = call(client.describe_training_job, TrainingJobName=self.latest_job)
        return str(found["ModelArtifacts"]["S3ModelArtifacts"])

    def _upload(self, job: Job, name: str, region: str) -> None:
        if job.source_dir and job.source_dir.startswith("s3://"):
            return
        target = job.source(name).removeprefix("s3://")
        bucket, _, key = target.partition("/")
        client = self._session.client("s3", region_name=region)
        if not job.code_location:
            make_bucket(client, bucket, region)
        call(client.put_object, Bucket=bucket, Key=key, Body=pack(self._files))


def _new_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by their present names."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        new = _RENAMED.get(name, name)
        if new != name:
            warnings.warn(f"{name} is now called {new}", DeprecationWarning, stacklevel=4)
            if new in given:
                raise ArgumentError(f"both {name} and {new}: they are the same argument; give {new}")
        if new in _IGNORED:
            warnings.warn(f"{name} has no effect here: the image decides (image_uri)", stacklevel=4)
        elif new not in FIELDS and new != "distribution":
            raise ArgumentError(f"Estimator has no argument {name!r}")
        elif value is not None:
            found[new] = value
    return found


def _mpi(distribution: Mapping[str, Any] | None, processes_per_host: int | None) -> dict[str, Any]:
    """What `distribution` says of MPI; `given` is False if nothing does."""
    unknown = set(distribution or ()) - {"mpi"}
    if unknown:
        raise ArgumentError(f"distribution: only 'mpi' is known here, not {', '.join(sorted(unknown))}")
    mpi = dict((distribution or {}).get("mpi") or {})
    unknown = set(mpi) - {"enabled", "processes_per_host", "custom_mpi_options"}
    if unknown:
        raise ArgumentError(f"distribution['mpi']: {', '.join(sorted(unknown))}: not known")
    each = mpi.get("processes_per_host")
    if processes_per_host is not None and each not in (None, processes_per_host):
        raise ArgumentError(f"processes_per_host is {processes_per_host}, but in `distribution` it is {each}")
    each = processes_per_host if each is None else each
    if each is not None and each < 1:
        raise ArgumentError(f"processes_per_host {each}: it must be 1 or more")
    options, notes = mpi_options(mpi.get("custom_mpi_options") or "")
    for note in notes:
        warnings.warn(f"custom_mpi_options: {note}", stacklevel=4)
    return {
        "given": bool(mpi) or processes_per_host is not None,
        "enabled": mpi.get("enabled", processes_per_host is not None),
        "processes_per_host": each,
        "custom_mpi_options": options,
    }


def worker_channel(name: str) -> str:
    """In a script: the channel of this rank, ``<name>_<local rank>`` where each worker has its own.

    Returns:
        `name` itself where the job has a channel of that name.

    Raises:
        ArgumentError: there is neither.
    """
    channels = json.loads(os.environ.get("SM_CHANNELS", "[]"))
    local = next(
        (
            os.environ[key]
            for key in ("OMPI_COMM_WORLD_LOCAL_RANK", "RINGDANCE_LOCAL_RANK")
            if key in os.environ
        ),
        "0",
    )
    for found in (name, f"{name}_{local}"):
        if found in channels:
            return found
    raise ArgumentError(
        f"there is no channel {name!r} and no {name}_{local}; there are {', '.join(channels)}"
    )
