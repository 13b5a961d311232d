"""The request that starts a training job on SageMaker, as plain data: nothing here speaks with AWS.

Names and forms are those of the service's ``CreateTrainingJob``; what a script finds in its container is
decided by the hyperparameters whose names begin with ``sagemaker_`` (read there by the package
sagemaker-training).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.launch.environment import shown_text

OUTPUT_FOLDER = "/opt/ml/output/data"
"""What a job leaves here the service uploads as ``output.tar.gz``."""

_MOST_CHANNELS = 20
_SETTING = re.compile(r"(?:--?)?([A-Z][A-Z0-9_]*)=(.*)")
_OF_THE_TOOLKIT = "NCCL_DEBUG"


@dataclass(frozen=True)
class Input:
    """A channel: data in S3 that the script finds in ``/opt/ml/input/data/<channel>``.

    Attributes:
        s3_data: ``s3://bucket/prefix`` (or, in local mode, ``file://`` and a folder).
        distribution: "FullyReplicated": each host gets all; "ShardedByS3Key": each a part of the objects.
        input_mode: "File", "Pipe" or "FastFile"; None for the job's.
        content_type, compression, record_wrapping: as in the service's ``Channel``.
        s3_data_type: "S3Prefix", "ManifestFile" or "AugmentedManifestFile".
        shuffle_seed: order of the objects, anew in each epoch of Pipe mode.
    """

    s3_data: str
    distribution: str | None = "FullyReplicated"
    input_mode: str | None = None
    content_type: str | None = None
    compression: str | None = None
    record_wrapping: str | None = None
    s3_data_type: str = "S3Prefix"
    shuffle_seed: int | None = None

    def channel(self, name: str) -> dict[str, Any]:
        """The request's ``Channel`` of that name."""
        source = {"S3DataType": self.s3_data_type, "S3Uri": self.s3_data}
        if self.distribution:
            source["S3DataDistributionType"] = self.distribution
        found: dict[str, Any] = {"DataSource": {"S3DataSource": source}, "ChannelName": name}
        for key, value in (
            ("CompressionType", self.compression), ("ContentType", self.content_type),
            ("RecordWrapperType", self.record_wrapping), ("InputMode", self.input_mode),
        ):  # fmt: skip
            if value:
                found[key] = value
        if self.shuffle_seed is not None:
            found["ShuffleConfig"] = {"Seed": self.shuffle_seed}
        return found


Inputs = str | Input | Mapping[str, "str | Input"] | None


@dataclass(frozen=True)
class Job:
    """All that a job is: see :class:`ringdance.submit.sagemaker.Estimator`, which fills it in."""

    entry_point: str
    image_uri: str
    role: str
    instance_type: str
    instance_count: int
    processes_per_host: int | None
    custom_mpi_options: str
    mpi: bool
    region: str
    bucket: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    source_dir: str | None = None
    output_path: str | None = None
    code_location: str | None = None
    volume_size: int = 30
    volume_kms_key: str | None = None
    output_kms_key: str | None = None
    max_run: int = 24 * 3600
    input_mode: str = "File"
    use_spot_instances: bool = False
    max_wait: int | None = None
    checkpoint_s3_uri: str | None = None
    checkpoint_local_path: str | None = None
    metric_definitions: Sequence[Mapping[str, str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Sequence[Mapping[str, str]] = ()
    subnets: Sequence[str] = ()
    security_group_ids: Sequence[str] = ()
    encrypt_inter_container_traffic: bool = False
    enable_network_isolation: bool = False
    keep_alive_period_in_seconds: int | None = None
    max_retry_attempts: int | None = None
    container_log_level: int = 20
    model_dir: str | None = None
    enable_sagemaker_metrics: bool = True
    debugger_hook: bool = True
    disable_profiler: bool = False

    @property
    def output(self) -> str:
        """Where models and outputs go."""
        return self.output_path or f"s3://{self.bucket}/"

    def source(self, name: str) -> str:
        """Where the code of the job `name` lies."""
        if self.source_dir and self.source_dir.startswith("s3://"):
            return self.source_dir
        return f"{(self.code_location or f's3://{self.bucket}').rstrip('/')}/{name}/source/sourcedir.tar.gz"

    def all_hyperparameters(self, name: str) -> dict[str, Any]:
        """The script's, and those that tell the container what to run."""
        found = dict(self.hyperparameters)
        found["sagemaker_mpi_enabled"] = self.mpi
        if self.processes_per_host:
            found["sagemaker_mpi_num_of_processes_per_host"] = self.processes_per_host
            found["sagemaker_mpi_custom_mpi_options"] = self.custom_mpi_options
        if self.model_dir is not None:
            found["model_dir"] = self.model_dir
        return found | {
            "sagemaker_submit_directory": self.source(name),
            "sagemaker_program": self.entry_point,
            "sagemaker_container_log_level": self.container_log_level,
            "sagemaker_job_name": name,
            "sagemaker_region": self.region,
        }

    def request(self, name: str, inputs: Inputs = None) -> dict[str, Any]:
        """The arguments of ``create_training_job``.

        Raises:
            ArgumentError: the inputs cannot be used.
        """
        algorithm: dict[str, Any] = {
            "TrainingInputMode": self.input_mode,
            "TrainingImage": self.image_uri,
            "EnableSageMakerMetricsTimeSeries": self.enable_sagemaker_metrics,
        }
        if self.metric_definitions:
            algorithm["MetricDefinitions"] = [dict(item) for item in self.metric_definitions]
        request: dict[str, Any] = {
            "TrainingJobName": name,
            "AlgorithmSpecification": algorithm,
            "RoleArn": self.role,
            "OutputDataConfig": {"S3OutputPath": self.output},
            "ResourceConfig": {
                "InstanceCount": self.instance_count,
                "InstanceType": self.instance_type,
                "VolumeSizeInGB": self.volume_size,
            },
            "StoppingCondition": {"MaxRuntimeInSeconds": self.max_run},
            "HyperParameters": {k: json.dumps(v) for k, v in self.all_hyperparameters(name).items()},
            "ProfilerConfig": {"S3OutputPath": self.output, "DisableProfiler": self.disable_profiler},
        }
        if self.disable_profiler:
            request["ProfilerConfig"] = {"DisableProfiler": True}
        # The debugger cannot go with checkpoints of several machines.
        checkpoints = self.checkpoint_s3_uri and self.checkpoint_local_path and self.instance_count > 1
        if self.debugger_hook and not checkpoints:
            request["DebugHookConfig"] = {"S3OutputPath": self.output, "CollectionConfigurations": []}
        channels = self.channels(inputs)
        if channels:
            request["InputDataConfig"] = channels
        self._add_options(request)
        return request

    def _add_options(self, request: dict[str, Any]) -> None:
        resources = request["ResourceConfig"]
        if self.output_kms_key:
            request["OutputDataConfig"]["KmsKeyId"] = self.output_kms_key
        if self.volume_kms_key:
            resources["VolumeKmsKeyId"] = self.volume_kms_key
        if self.keep_alive_period_in_seconds is not None:
            resources["KeepAlivePeriodInSeconds"] = self.keep_alive_period_in_seconds
        if self.use_spot_instances:
            request["EnableManagedSpotTraining"] = True
        if self.max_wait is not None:
            request["StoppingCondition"]["MaxWaitTimeInSeconds"] = self.max_wait
        if self.checkpoint_s3_uri:
            request["CheckpointConfig"] = {"S3Uri": self.checkpoint_s3_uri}
            if self.checkpoint_local_path:
                request["CheckpointConfig"]["LocalPath"] = self.checkpoint_local_path
        if self.environment:
            request["Environment"] = dict(self.environment)
        if self.tags:
            request["Tags"] = [dict(tag) for tag in self.tags]
        if self.subnets and self.security_group_ids:
            request["VpcConfig"] = {
                "Subnets": list(self.subnets),
                "SecurityGroupIds": list(self.security_group_ids),
            }
        if self.encrypt_inter_container_traffic:
            request["EnableInterContainerTrafficEncryption"] = True
        if self.enable_network_isolation:
            request["EnableNetworkIsolation"] = True
        if self.max_retry_attempts is not None:
            request["RetryStrategy"] = {"MaximumRetryAttempts": self.max_retry_attempts}

    def channels(self, inputs: Inputs) -> list[dict[str, Any]]:
        """The request's channels.

        A pipe can be read by one process only: with several on a host each worker gets a channel of its own,
        ``<name>_<local rank>``, with the same data.

        Raises:
            ArgumentError: a channel that the service would refuse.
        """
        found = []
        for name, given in as_channels(inputs).items():
            mode = given.input_mode or self.input_mode
            workers = self.processes_per_host or 1
            if mode == "Pipe" and workers > 1:
                found += [given.channel(f"{name}_{worker}") for worker in range(workers)]
            else:
                found.append(given.channel(name))
            if given.distribution not in (None, "FullyReplicated", "ShardedByS3Key"):
                raise ArgumentError(
                    f"channel {name!r}: distribution {given.distribution!r} is neither FullyReplicated nor "
                    "ShardedByS3Key"
                )
            if mode not in ("File", "Pipe", "FastFile"):
                raise ArgumentError(f"channel {name!r}: input mode {mode!r} is none of File, Pipe, FastFile")
        if len(found) > _MOST_CHANNELS:
            raise ArgumentError(
                f"{len(found)} channels, but SageMaker allows {_MOST_CHANNELS}; in Pipe mode each of the "
                f"{self.processes_per_host} workers of a host needs its own: take FastFile mode instead"
            )
        return found


def as_channels(inputs: Inputs) -> dict[str, Input]:
    """Inputs in any of their forms as channels by name; a single one is called ``training``."""
    if inputs is None:
        return {}
    named = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    return {name: given if isinstance(given, Input) else Input(given) for name, given in named.items()}


def mpi_options(text: str) -> tuple[str, list[str]]:
    """Custom MPI options as mpirun and the container's toolkit understand them, and what was changed.

    ``--NAME=VALUE`` or ``NAME=VALUE`` with a name in capitals is meant to be an environment variable of the
    ranks, and is no option of any mpirun: it becomes ``-x NAME=VALUE``. ``--NCCL_DEBUG=VALUE`` stays, as the
    toolkit itself takes it (and sets the variable, to INFO if it is not given).

    Raises:
        ArgumentError: a quotation mark that is not closed.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ArgumentError(f"custom_mpi_options {shown_text(text)!r}: {error}") from None
    kept: list[str] = []
    notes = []
    value_follows = False
    for word in words:
        setting = None if value_follows else _SETTING.fullmatch(word)
        value_follows = word in ("-x", "--x")
        if setting is None or (setting[1] == _OF_THE_TOOLKIT and word.startswith("--")):
            kept.append(word)
            continue
        new = f"--{word.lstrip('-')}" if setting[1] == _OF_THE_TOOLKIT else f"-x {setting[1]}={setting[2]}"
        note = f"{word!r} is no option of mpirun: it is meant to set a variable, and now is {new!r}"
        notes.append(shown_text(note))
        kept += new.split(" ", 1)
    if not notes:
        return text, []
    if any(any(sign.isspace() for sign in word) for word in kept):
        # The toolkit splits at spaces and knows no quotation marks.
        raise ArgumentError(f"custom_mpi_options {shown_text(text)!r}: values with spaces do not reach "
                            "mpirun; set them with `environment`")  # fmt: skip
    return " ".join(kept), notes


def job_name(base: str, now: datetime | None = None) -> str:
    """A name for a job: letters, digits and '-', at most 63 characters, the time at its end."""
    moment = now or datetime.now(UTC)
    stamp = moment.strftime("%Y-%m-%d-%H-%M-%S-") + f"{moment.microsecond // 1000:03d}"
    cleaned = re.sub(r"[^A-Za-z0-9]+", "-", base).strip("-") or "job"
    return f"{cleaned[: 62 - len(stamp)]}-{stamp}"


def account_of(role: str) -> str:
    """The account's number in a role's ARN, "" if it is none."""
    parts = role.split(":")
    return parts[4] if len(parts) >= 6 and parts[0] == "arn" else ""


def program(entry_point: str, source_dir: str | None) -> str:
    """The script's path within the code that is sent along.

    Raises:
        ArgumentError: there is no such file.
    """
    if source_dir is None:
        if not os.path.isfile(entry_point):
            raise ArgumentError(f"entry_point {entry_point!r}: there is no such file (in {os.getcwd()})")
        return os.path.basename(entry_point)
    if not source_dir.startswith("s3://") and not os.path.isfile(os.path.join(source_dir, entry_point)):
        raise ArgumentError(
            f"entry_point {entry_point!r}: there is no such file in source_dir {source_dir!r}"
        )
    return entry_point


FIELDS = tuple(item.name for item in dataclasses.fields(Job))
