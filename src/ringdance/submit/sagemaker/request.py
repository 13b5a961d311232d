"""Build the requests that start training jobs on SageMaker, as plain data. Nothing here connects to AWS.

Names and structure follow the service's ``CreateTrainingJob``. Hyperparameters whose names start with
``sagemaker_`` configure the container, in which the package sagemaker-training reads them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.launch.remote.environment import shown_text
from ringdance.submit.sagemaker.job import TrainingJob

_MAX_CHANNELS = 20
_SETTING = re.compile(r"(?<!\S)(?<!-x )-{0,2}([A-Z][A-Z0-9_]*)=\S*")
_OF_THE_TOOLKIT = "NCCL_DEBUG"


@dataclass(frozen=True)
class Input:
    """A channel: data in S3 that the script reads from ``/opt/ml/input/data/<channel>``.

    Attributes:
        s3_data: ``s3://bucket/prefix``. In Pipe mode, each worker on a host has its own channel, and
            ``{worker}`` stands for the worker's local rank.
        distribution: "FullyReplicated" sends all objects to each host. "ShardedByS3Key" (or "s3shardbykey")
            sends each host a part of the objects.
        input_mode: "File", "Pipe" or "FastFile". None means the job's mode.
        content_type, compression, record_wrapping: The service's ``Channel`` settings.
        s3_data_type: "S3Prefix", "ManifestFile" or "AugmentedManifestFile".
        shuffle_seed: Seed for the order of the objects, which differs between workers. In Pipe mode,
            every epoch has a new order.
    """

    s3_data: str
    distribution: str | None = "FullyReplicated"
    input_mode: str | None = None
    content_type: str | None = None
    compression: str | None = None
    record_wrapping: str | None = None
    s3_data_type: str = "S3Prefix"
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        if (self.distribution or "").lower() in ("s3shardbykey", "shardedbys3key"):
            object.__setattr__(self, "distribution", "ShardedByS3Key")

    @classmethod
    def parse(cls, text: str) -> Input:
        """Parse "URI,NAME=VALUE,...". Each name is an attribute of this class.

        Raises:
            ArgumentError: A name is unknown, or the seed is not an integer.
        """
        names = [item.name for item in fields(cls)][1:]
        uri, *words = re.split(r",(?=\w+=)", text)
        options: dict[str, Any] = dict(word.split("=", 1) for word in words)
        if unknown := set(options) - set(names):
            known = f"The options are {', '.join(names)}"
            raise ArgumentError(f"--input {text}: unknown option {', '.join(sorted(unknown))}. {known}")
        if not re.fullmatch(r"\d+", options.get("shuffle_seed", "0")):
            raise ArgumentError(f"--input {text}: shuffle_seed must be a non-negative integer")
        if "shuffle_seed" in options:
            options["shuffle_seed"] = int(options["shuffle_seed"])
        return cls(uri, **options)

    def channel(self, name: str, worker: int = 0) -> dict[str, Any]:
        """Return the request's ``Channel`` for the worker with local rank ``worker`` on each host."""
        source = {"S3DataType": self.s3_data_type, "S3Uri": self.s3_data.replace("{worker}", str(worker))}
        if self.distribution:
            source["S3DataDistributionType"] = self.distribution
        parts = {
            "DataSource": {"S3DataSource": source}, "ChannelName": name, "CompressionType": self.compression,
            "ContentType": self.content_type, "RecordWrapperType": self.record_wrapping,
            "InputMode": self.input_mode,
            "ShuffleConfig": None if self.shuffle_seed is None else {"Seed": self.shuffle_seed + worker},
        }  # fmt: skip
        return {key: value for key, value in parts.items() if value}


Inputs = str | Input | Mapping[str, "str | Input"] | None


def create_request(job: TrainingJob, name: str, inputs: Inputs, region: str, bucket: str) -> dict[str, Any]:
    """Return the arguments of ``create_training_job``.

    Args:
        job: Script and machines.
        name: Name of the job.
        inputs: Channels of the job.
        region: AWS region of the job.
        bucket: Bucket for code and output, unless the job sets other locations.

    Raises:
        ArgumentError: The inputs cannot be used.
    """
    output = job.output_path or f"s3://{bucket}/"
    source = job.source_dir or ""
    if not source.startswith("s3://"):
        location = (job.code_location or f"s3://{bucket}").rstrip("/")
        source = f"{location}/{name}/source/sourcedir.tar.gz"
    profiler: dict[str, Any] = {} if job.disable_profiler else {"S3OutputPath": output}
    parameters = hyperparameters(job, name, source, region)
    request: dict[str, Any] = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingInputMode": job.input_mode,
            "TrainingImage": job.image_uri,
            "EnableSageMakerMetricsTimeSeries": job.enable_sagemaker_metrics,
        },
        "OutputDataConfig": {"S3OutputPath": output},
        "ProfilerConfig": {**profiler, "DisableProfiler": job.disable_profiler},
        "HyperParameters": {key: json.dumps(value) for key, value in parameters.items()},
    }
    # The service does not allow the debugger together with checkpoints from several machines.
    checkpoints = job.checkpoint_s3_uri and job.checkpoint_local_path
    if job.debugger_hook and not (checkpoints and job.instance_count > 1):
        request["DebugHookConfig"] = {"S3OutputPath": output, "CollectionConfigurations": []}
    if sources := channels(inputs, job.input_mode, job.processes_per_host or 1):
        request["InputDataConfig"] = sources
    for item in fields(job):
        value = getattr(job, item.name)
        empty = value is False or value in (None, "", (), [], {})
        if "key" in item.metadata and not empty:
            *path, last = item.metadata["key"].split(".")
            part = request
            for step in path:
                part = part.setdefault(step, {})
            part[last] = value
    if not job.checkpoint_s3_uri:
        request.pop("CheckpointConfig", None)
    return request


def hyperparameters(job: TrainingJob, name: str, source: str, region: str) -> dict[str, Any]:
    """Return the script's hyperparameters, and those that tell the container what to run."""
    parameters = dict(job.hyperparameters)
    if job.mpi is not None:
        parameters["sagemaker_mpi_enabled"] = job.mpi
    if job.processes_per_host:
        parameters["sagemaker_mpi_num_of_processes_per_host"] = job.processes_per_host
        parameters["sagemaker_mpi_custom_mpi_options"] = job.custom_mpi_options
    if job.model_dir is not None:
        parameters["model_dir"] = job.model_dir
    uploaded = job.source_dir is None
    return parameters | {
        "sagemaker_submit_directory": source,
        "sagemaker_program": os.path.basename(job.entry_point) if uploaded else job.entry_point,
        "sagemaker_container_log_level": job.container_log_level,
        "sagemaker_job_name": name,
        "sagemaker_region": region,
    }


def channels(inputs: Inputs, input_mode: str, workers: int) -> list[dict[str, Any]]:
    """Return the request's channels.

    Only one process can read a pipe. With several ``workers`` on a host, each therefore gets its own channel
    ``<name>_<local rank>``. All have the same data, unless ``{worker}`` in the S3 URI selects a part.

    Raises:
        ArgumentError: The service would reject a channel.
    """
    requested = []
    for name, channel in as_channels(inputs).items():
        mode = channel.input_mode or input_mode
        piped = mode == "Pipe" and workers > 1
        names = [f"{name}_{worker}" for worker in range(workers)] if piped else [name]
        requested += [channel.channel(label, worker) for worker, label in enumerate(names)]
        if piped and "{worker}" not in channel.s3_data and channel.shuffle_seed is None:
            warnings.warn(
                f"channel {name!r}: the {workers} workers on each host read the same rows in the same order, "
                "so all of them compute the same gradient. Give each worker its own part of the data with "
                "s3://.../{worker}/, where {worker} is its local rank, or at least its own order with "
                "shuffle_seed",
                stacklevel=5,
            )
        if channel.distribution not in (None, "FullyReplicated", "ShardedByS3Key"):
            raise ArgumentError(
                f"channel {name!r}: distribution {channel.distribution!r} is neither FullyReplicated nor "
                "ShardedByS3Key"
            )
        if mode not in ("File", "Pipe", "FastFile"):
            raise ArgumentError(f"channel {name!r}: input mode {mode!r} is not File, Pipe or FastFile")
    if len(requested) > _MAX_CHANNELS:
        raise ArgumentError(
            f"the job has {len(requested)} channels, but SageMaker allows {_MAX_CHANNELS}. In Pipe mode, "
            f"each of the {workers} workers on a host needs its own channel. Use FastFile mode instead."
        )
    return requested


def as_channels(inputs: Inputs) -> dict[str, Input]:
    """Return inputs of any form as a dict of channels by name. A single input is called ``training``."""
    if inputs is None:
        return {}
    named = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    return {name: data if isinstance(data, Input) else Input(data) for name, data in named.items()}


def mpi_options(text: str) -> tuple[str, list[str]]:
    """Correct custom MPI options so that mpirun and the container's toolkit accept them.

    ``--NAME=VALUE`` or ``NAME=VALUE`` with an uppercase name is meant to set an environment variable for the
    ranks, but no mpirun has such an option. It is replaced by ``-x NAME=VALUE``. ``--NCCL_DEBUG=VALUE`` is
    kept, because the toolkit itself reads it and sets the variable (to INFO if the option is missing).

    Returns:
        The options, and a note about each change.

    Raises:
        ArgumentError: The text contains quotation marks.
    """
    if any(sign in text for sign in "'\""):
        # The toolkit splits the text at spaces and does not understand quotation marks.
        raise ArgumentError(f"custom_mpi_options {shown_text(text)!r}: quotes are not supported here. "
                            "Use `environment` to set values that contain spaces.")  # fmt: skip
    notes: list[str] = []

    def as_variable(found: re.Match[str]) -> str:
        word, toolkit = found[0], found[1] == _OF_THE_TOOLKIT
        new = f"{'--' if toolkit else '-x '}{word.lstrip('-')}"
        if new != word:
            reason = f"{word!r} is not an option of mpirun, but looks like a variable"
            notes.append(shown_text(f"{reason}. It was changed to {new!r}"))
        return new

    return _SETTING.sub(as_variable, " ".join(text.split())), notes
