"""Jobs described to SageMaker's SDK v2, to compare the requests it sends with ours.

``tests/unit/submit/sagemaker_requests.json`` holds its requests (SDK 2.257). If that SDK is installed,
``tests/dropin/test_sagemaker_sdk.py`` checks them again. Run this file with its Python to record them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "unit" / "submit" / "sagemaker_requests.json"
NAME = "job-1"
BUCKET = "sagemaker-us-east-1-123456789012"
COMMON = {
    "entry_point": "train.py",
    "role": "arn:aws:iam::123456789012:role/Training",
    "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
    "instance_type": "ml.p3.16xlarge",
    "instance_count": 2,
}
MPI = {"enabled": True, "processes_per_host": 8}
S3 = f"s3://{BUCKET}"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "mxnet": (
        "MXNet",
        {"distribution": {"mpi": MPI}, "hyperparameters": {"epochs": 3, "lr": 0.1, "s": "a b", "on": True}},
        {"training": {"s3_data": f"{S3}/data"}},
    ),
    "mxnet with options": (
        "MXNet",
        {"distribution": {"mpi": {**MPI, "custom_mpi_options": "-verbose -x NCCL_DEBUG=VERSION"}}},
        {},
    ),
    "mxnet, an option of the toolkit": (
        "MXNet", {"distribution": {"mpi": {**MPI, "custom_mpi_options": "--NCCL_DEBUG=INFO"}}}, {},
    ),
    "mxnet without mpi": (
        "MXNet",
        {"instance_count": 1, "instance_type": "ml.p3.2xlarge"},  # a single GPU
        {"training": {"s3_data": f"{S3}/data"}},
    ),
    "tensorflow": (
        "TensorFlow",
        {"distribution": {"mpi": MPI}, "model_dir": "/opt/ml/model"},
        {"train": {"s3_data": f"{S3}/train", "distribution": "ShardedByS3Key"}, "v": {"s3_data": f"{S3}/t"}},
    ),
    "tensorflow, everything": (
        "TensorFlow",
        {
            "distribution": {"mpi": {**MPI, "custom_mpi_options": "-x A=1"}},
            "model_dir": f"{S3}/model",
            "hyperparameters": {"epochs": 3},
            "use_spot_instances": True, "max_wait": 7200, "max_run": 3600,
            "checkpoint_s3_uri": f"{S3}/checkpoints", "checkpoint_local_path": "/opt/ml/checkpoints",
            "metric_definitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}],
            "environment": {"A": "1"}, "tags": [{"Key": "team", "Value": "vision"}],
            "subnets": ["subnet-1"], "security_group_ids": ["sg-1"], "volume_size": 100,
            "volume_kms_key": "key-1", "output_kms_key": "key-2", "max_retry_attempts": 2,
            "encrypt_inter_container_traffic": True, "output_path": f"{S3}/output",
            "container_log_level": 10, "input_mode": "FastFile",
        },
        {
            "train": {"s3_data": f"{S3}/train", "content_type": "tfrecord", "compression": "Gzip",
                      "record_wrapping": "RecordIO", "input_mode": "File"},
        },
    ),
}  # fmt: skip
_VERSIONS = {"MXNet": ("1.9", "py38"), "TensorFlow": ("2.14", "py310")}


def sent_by_the_sdk(case: str, source_dir: str) -> dict[str, Any]:
    """Return the request that SDK v2 sends to the service (here a fake)."""
    import boto3
    import sagemaker
    from moto import mock_aws
    from sagemaker.inputs import TrainingInput
    from sagemaker.mxnet import MXNet
    from sagemaker.tensorflow import TensorFlow

    kind, options, inputs = CASES[case]
    framework, python = _VERSIONS[kind]
    logging.disable(logging.WARNING)
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        session = sagemaker.Session(default_bucket=BUCKET)
        sent: dict[str, Any] = {}
        send = session.sagemaker_client.create_training_job
        session.sagemaker_client.create_training_job = lambda **request: (
            sent.update(request) or send(**request)
        )
        estimator = {"MXNet": MXNet, "TensorFlow": TensorFlow}[kind](
            **{**COMMON, **options}, source_dir=source_dir, sagemaker_session=session,
            framework_version=framework, py_version=python,
        )  # fmt: skip
        channels = {name: TrainingInput(**fields) for name, fields in inputs.items()}
        estimator.fit(channels or None, wait=False, job_name=NAME)
    return sent


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "train.py").write_text("")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "test"
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    RECORDED.write_text(
        json.dumps({case: sent_by_the_sdk(case, str(directory)) for case in CASES}, indent=1, sort_keys=True)
        + "\n"
    )
