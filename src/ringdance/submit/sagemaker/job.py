"""Training jobs as plain data, and names for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ringdance.submit.options import option

NOT_UPLOADED = ("__pycache__", ".git", ".ipynb_checkpoints")


def _sent(key: str, default: Any = None) -> Any:
    """Declare a field that, if it is set, is sent in the request as ``key``."""
    return field(default=default, metadata={"key": key})


@dataclass
class TrainingJob:
    """A script, its machines and its SageMaker settings. ``Estimator`` describes the fields."""

    entry_point: str
    source_dir: str | None = option("directory to upload (default: only the script)", metavar="DIR")
    role: str = option("ARN of the job's role", "", key="RoleArn")
    instance_type: str = option("machine type, such as ml.p3.16xlarge", "", key="ResourceConfig.InstanceType")
    instance_count: int = option("number of machines", 1, key="ResourceConfig.InstanceCount")
    processes_per_host: int | None = option("ranks per machine (default: one per GPU, or 1)", type=int)
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    distribution: Mapping[str, Any] | None = None
    image_uri: str = option(
        "container image that contains sagemaker-training and an MPI library", "", "--image", metavar="URI"
    )
    _: KW_ONLY
    custom_mpi_options: str = option(
        "more options for mpirun, in one quoted argument", "", "--mpi-options", metavar="TEXT"
    )
    base_job_name: str | None = None
    boto_session: Any = None
    region: str | None = option("AWS region (default: AWS_REGION, or boto3's configuration)")
    output_path: str | None = option("S3 URI for model and other output", None, "--output", metavar="S3URI")
    code_location: str | None = None
    volume_size: int = option("disk size", 30, metavar="GB", key="ResourceConfig.VolumeSizeInGB")
    volume_kms_key: str | None = _sent("ResourceConfig.VolumeKmsKeyId")
    output_kms_key: str | None = _sent("OutputDataConfig.KmsKeyId")
    max_run: int = option("maximum run time", 86400, metavar="S", key="StoppingCondition.MaxRuntimeInSeconds")
    input_mode: str = option("default input mode of channels", "File", choices=("File", "Pipe", "FastFile"))
    use_spot_instances: bool = option(
        "use spot instances; requires --max-wait", False, "--spot", key="EnableManagedSpotTraining"
    )
    max_wait: int | None = option(
        "limit for waiting and running", type=int, metavar="S", key="StoppingCondition.MaxWaitTimeInSeconds"
    )
    checkpoint_s3_uri: str | None = option(
        "S3 URI for /opt/ml/checkpoints", None, "--checkpoint", metavar="URI", key="CheckpointConfig.S3Uri"
    )
    checkpoint_local_path: str | None = _sent("CheckpointConfig.LocalPath")
    metric_definitions: Sequence[Mapping[str, str]] = _sent("AlgorithmSpecification.MetricDefinitions", ())
    environment: Mapping[str, str] | None = _sent("Environment")
    tags: Sequence[Mapping[str, str]] = _sent("Tags", ())
    subnets: Sequence[str] = _sent("VpcConfig.Subnets", ())
    security_group_ids: Sequence[str] = _sent("VpcConfig.SecurityGroupIds", ())
    encrypt_inter_container_traffic: bool = _sent("EnableInterContainerTrafficEncryption", False)
    enable_network_isolation: bool = _sent("EnableNetworkIsolation", False)
    keep_alive_period_in_seconds: int | None = _sent("ResourceConfig.KeepAlivePeriodInSeconds")
    max_retry_attempts: int | None = _sent("RetryStrategy.MaximumRetryAttempts")
    container_log_level: int = 20
    model_dir: str | None = None
    enable_sagemaker_metrics: bool = True
    debugger_hook: bool = True
    disable_profiler: bool = False
    mpi: bool | None = field(init=False, default=None)

    @property
    def files(self) -> str:
        """Directory or S3 URI that contains the script, or the script itself."""
        return self.source_dir or self.entry_point


def job_name(base: str) -> str:
    """Build a job name of at most 63 letters, digits and '-' from ``base`` and the current time."""
    moment = datetime.now(UTC)
    stamp = moment.strftime("%Y-%m-%d-%H-%M-%S-") + f"{moment.microsecond // 1000:03d}"
    cleaned = re.sub(r"[^A-Za-z0-9]+", "-", base).strip("-") or "job"
    return f"{cleaned[: 62 - len(stamp)]}-{stamp}"


def account_of(role: str) -> str:
    """Return the account number in a role's ARN, or an empty string if ``role`` is not an ARN."""
    parts = role.split(":")
    return parts[4] if len(parts) >= 6 and parts[0] == "arn" else ""
