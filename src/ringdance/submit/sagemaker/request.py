"""Requests that start training jobs on SageMaker, as plain data: nothing here connects to AWS.

Names and forms are those of the service's ``CreateTrainingJob``; what a script finds in its container is
decided by the hyperparameters whose names begin with ``sagemaker_`` (read there by the package
sagemaker-training).
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
    """A channel: data in S3 that the script finds in ``/opt/ml/input/data/<channel>``.

    Attributes:
        s3_data: ``s3://bucket/prefix``. ``{worker}`` is the local rank, where each worker of a host has a
            channel of its own (Pipe mode).
        distribution: "FullyReplicated": each host gets all; "ShardedByS3Key" (or "s3shardbykey"): each a part
            of the objects.
        input_mode: "File", "Pipe" or "FastFile"; None for the job's.
        content_type, compression, record_wrapping: as in the service's ``Channel``.
        s3_data_type: "S3Prefix", "ManifestFile" or "AugmentedManifestFile".
        shuffle_seed: order of the objects, anew in each epoch of Pipe mode; another one for each worker.
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
        """Make an input of "URI,NAME=VALUE,..." with the names of the attributes.

        Raises:
            ArgumentError: a name is unknown.
        """
        names = [item.name for item in fields(cls)][1:]
        uri, *words = re.split(r",(?=\w+=)", text)
        given: dict[str, Any] = dict(word.split("=", 1) for word in words)
        if unknown := set(given) - set(names):
            raise ArgumentError(f"--input {text}: {', '.join(sorted(unknown))}: none of {', '.join(names)}")
        if "shuffle_seed" in given:
            given["shuffle_seed"] = int(given["shuffle_seed"])
        return cls(uri, **given)

    def channel(self, name: str, worker: int = 0) -> dict[str, Any]:
        """Return the request's ``Channel`` of that name, for a worker of each host."""
        source = {"S3DataType": self.s3_data_type, "S3Uri": self.s3_data.replace("{worker}", str(worker))}
        if self.distribution:
            source["S3DataDistributionType"] = self.distribution
        found = {
            "DataSource": {"S3DataSource": source}, "ChannelName": name, "CompressionType": self.compression,
            "ContentType": self.content_type, "RecordWrapperType": self.record_wrapping,
            "InputMode": self.input_mode,
            "ShuffleConfig": None if self.shuffle_seed is None else {"Seed": self.shuffle_seed + worker},
        }  # fmt: skip
        return {key: value for key, value in found.items() if value}


Inputs = str | Input | Mapping[str, "str | Input"] | None


def create_request(job: TrainingJob, name: str, inputs: Inputs, region: str, bucket: str) -> dict[str, Any]:
    """Return the arguments of ``create_training_job``.

    Args:
        job: what to run, and where.
        name: of the job.
        inputs: its channels.
        region: where it runs.
        bucket: for the code and the output, where the job names no others.

    Raises:
        ArgumentError: the inputs cannot be used.
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
    # The service refuses the debugger together with checkpoints of several machines.
    checkpoints = job.checkpoint_s3_uri and job.checkpoint_local_path
    if job.debugger_hook and not (checkpoints and job.instance_count > 1):
        request["DebugHookConfig"] = {"S3OutputPath": output, "CollectionConfigurations": []}
    if found := channels(inputs, job.input_mode, job.processes_per_host or 1):
        request["InputDataConfig"] = found
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
    """Return the script's hyperparameters, and those from which the container knows what to run."""
    found = dict(job.hyperparameters)
    if job.mpi is not None:
        found["sagemaker_mpi_enabled"] = job.mpi
    if job.processes_per_host:
        found["sagemaker_mpi_num_of_processes_per_host"] = job.processes_per_host
        found["sagemaker_mpi_custom_mpi_options"] = job.custom_mpi_options
    if job.model_dir is not None:
        found["model_dir"] = job.model_dir
    uploaded = job.source_dir is None
    return found | {
        "sagemaker_submit_directory": source,
        "sagemaker_program": os.path.basename(job.entry_point) if uploaded else job.entry_point,
        "sagemaker_container_log_level": job.container_log_level,
        "sagemaker_job_name": name,
        "sagemaker_region": region,
    }


def channels(inputs: Inputs, input_mode: str, workers: int) -> list[dict[str, Any]]:
    """Return the request's channels.

    A pipe can be read by one process only: with several `workers` on a host each gets a channel of its own,
    ``<name>_<local rank>``, with the same data or, by ``{worker}`` in their address, with its part of them.

    Raises:
        ArgumentError: a channel that the service would refuse.
    """
    found = []
    for name, given in as_channels(inputs).items():
        mode = given.input_mode or input_mode
        piped = mode == "Pipe" and workers > 1
        names = [f"{name}_{worker}" for worker in range(workers)] if piped else [name]
        found += [given.channel(one, worker) for worker, one in enumerate(names)]
        if piped and "{worker}" not in given.s3_data and given.shuffle_seed is None:
            warnings.warn(
                f"channel {name!r}: each of the {workers} workers of a host reads the same rows in the same "
                "order, and all compute the same gradient. Give each a part, such as s3://.../{worker}/ for "
                "the worker's number, or at least another order by shuffle_seed",
                stacklevel=5,
            )
        if given.distribution not in (None, "FullyReplicated", "ShardedByS3Key"):
            raise ArgumentError(
                f"channel {name!r}: distribution {given.distribution!r} is neither FullyReplicated nor "
                "ShardedByS3Key"
            )
        if mode not in ("File", "Pipe", "FastFile"):
            raise ArgumentError(f"channel {name!r}: input mode {mode!r} is none of File, Pipe, FastFile")
    if len(found) > _MAX_CHANNELS:
        raise ArgumentError(
            f"{len(found)} channels, but SageMaker allows {_MAX_CHANNELS}; in Pipe mode each of the "
            f"{workers} workers of a host needs its own: use FastFile mode instead"
        )
    return found


def as_channels(inputs: Inputs) -> dict[str, Input]:
    """Return inputs of any form as channels by name; a single one is called ``training``."""
    if inputs is None:
        return {}
    named = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    return {name: given if isinstance(given, Input) else Input(given) for name, given in named.items()}


def mpi_options(text: str) -> tuple[str, list[str]]:
    """Correct custom MPI options so that mpirun and the container's toolkit understand them.

    ``--NAME=VALUE`` or ``NAME=VALUE`` with a name in capitals is meant to be an environment variable of the
    ranks, and is no option of any mpirun: it becomes ``-x NAME=VALUE``. ``--NCCL_DEBUG=VALUE`` stays, as the
    toolkit itself takes it (and sets the variable, to INFO if it is not given).

    Returns:
        The options, and a note on each that was changed.

    Raises:
        ArgumentError: it has quotation marks.
    """
    if any(sign in text for sign in "'\""):
        # The toolkit splits at spaces and knows no quotation marks.
        raise ArgumentError(f"custom_mpi_options {shown_text(text)!r}: quotation marks do not group words "
                            "here; set values with spaces with `environment`")  # fmt: skip
    notes: list[str] = []

    def as_variable(found: re.Match[str]) -> str:
        word, toolkit = found[0], found[1] == _OF_THE_TOOLKIT
        new = f"{'--' if toolkit else '-x '}{word.lstrip('-')}"
        if new != word:
            note = f"{word!r} is no option of mpirun but looks like a variable: changed to {new!r}"
            notes.append(shown_text(note))
        return new

    return _SETTING.sub(as_variable, " ".join(text.split())), notes
