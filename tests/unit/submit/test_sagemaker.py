"""Requests to SageMaker: equal to SDK v2's, accepted by a stand-in, and mistakes reported early."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked import run_forked
from sagemaker_cases import BUCKET, CASES, COMMON, NAME, RECORDED, S3
from sampled import sampled

from ringdance.errors import ArgumentError, LaunchError
from ringdance.submit.sagemaker import Estimator, Input, worker_channel
from ringdance.submit.sagemaker import aws as client
from ringdance.submit.sagemaker.cli import hyperparameters
from ringdance.submit.sagemaker.job import job_name
from ringdance.submit.sagemaker.request import mpi_options
from ringdance.tools.cli import main

EXPECTED = json.loads(RECORDED.read_text())


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "src"
    directory.mkdir()
    (directory / "train.py").write_text("print('training')\n")
    (directory / "package").mkdir()
    (directory / "package" / "module.py").write_text("")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def aws() -> Iterator[Any]:
    pytest.importorskip("boto3")
    moto = pytest.importorskip("moto")
    with moto.mock_aws():
        import boto3

        yield boto3


def estimator(**change: Any) -> Estimator:
    return Estimator(**{**COMMON, "processes_per_host": 8, **change})


@pytest.mark.parametrize("case", CASES)
def test_the_request_is_that_of_the_sdk(case: str, source: Path) -> None:
    _, options, inputs = CASES[case]
    ours = Estimator(**{**COMMON, **options}, source_dir=str(source))
    assert ours.request({name: Input(**given) for name, given in inputs.items()}, NAME) == EXPECTED[case]


@pytest.mark.parametrize("case", sampled("requests to SageMaker", list(CASES), 3))
def test_the_service_accepts_it(case: str, aws: Any, source: Path) -> None:
    _, options, inputs = CASES[case]
    ours = Estimator(**{**COMMON, **options}, source_dir=str(source))
    ours.fit({name: Input(**given) for name, given in inputs.items()}, wait=False, job_name=NAME)
    client = aws.client("sagemaker")
    assert client.list_training_jobs()["TrainingJobSummaries"][0]["TrainingJobName"] == NAME
    kept = client.describe_training_job(TrainingJobName=NAME)
    for key in ("HyperParameters", "InputDataConfig", "RoleArn", "StoppingCondition", "VpcConfig"):
        assert kept.get(key) == EXPECTED[case].get(key), key
    packed = aws.client("s3").get_object(Bucket=BUCKET, Key=f"{NAME}/source/sourcedir.tar.gz")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["package", "package/module.py", "train.py"]


def test_wait_says_how_the_job_ends_and_how_to_see_its_output(
    aws: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = estimator()
    assert started.fit(f"{S3}/data", job_name=NAME) == NAME
    message = capsys.readouterr().out
    tail = f"aws logs tail /aws/sagemaker/TrainingJobs --log-stream-name-prefix {NAME}/ --follow"
    assert ("Completed" in message, tail in message) == (True, True)
    running, failed = {"TrainingJobStatus": "InProgress"}, {"TrainingJobStatus": "Failed"}
    ends = iter([running, running, failed | {"FailureReason": "as asked"}])
    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=lambda seconds: None))
    service = SimpleNamespace(describe_training_job=lambda TrainingJobName: next(ends))
    with pytest.raises(LaunchError, match=f"training job {NAME}: Failed: as asked"):
        client.wait(service, NAME)
    assert capsys.readouterr().out.count(NAME) == 2


def test_waiting_goes_on_when_aws_throttles(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting continues after more refusals than boto3's own four retries cover."""
    import botocore.endpoint
    from botocore.awsrequest import AWSResponse

    monkeypatch.setattr(botocore.endpoint, "time", SimpleNamespace(sleep=lambda seconds: None))
    left = [8]

    def throttle(request: Any, **_: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            return None
        body = io.BytesIO(b'{"__type": "ThrottlingException", "message": "Rate exceeded"}')
        body.stream = lambda **_: iter([body.read()])  # type: ignore[attr-defined]
        return AWSResponse(request.url, 400, {}, body)

    started = estimator()
    started.fit(wait=False, job_name=NAME)
    sagemaker = client.client(aws.Session(region_name="us-east-1"), "sagemaker")
    sagemaker.meta.events.register_first("before-send.sagemaker", throttle)
    assert client.call(sagemaker.describe_training_job, TrainingJobName=NAME)["TrainingJobName"] == NAME
    assert left[0] < 0


def test_the_default_bucket_must_be_the_account_s(aws: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bucket's name can be guessed, so another account may have created it first."""
    asked: list[tuple[str, Any]] = []
    session = aws.Session(region_name="us-east-1")
    events = session._session.get_component("event_emitter")
    for name in ("ListObjectsV2", "PutObject"):
        events.register(
            f"before-parameter-build.s3.{name}",
            lambda params, model, **_: asked.append((model.name, params.get("ExpectedBucketOwner"))),
        )
    estimator(boto_session=session).fit(wait=False)
    assert asked == [("ListObjectsV2", "123456789012"), ("PutObject", "123456789012")]
    del asked[:]
    estimator(boto_session=session, code_location=f"s3://{BUCKET}").fit(wait=False)
    assert asked == [("PutObject", None)]


def test_what_aws_refuses_is_reported_in_one_line(aws: Any) -> None:
    location = f"s3://{BUCKET}"
    with pytest.raises(LaunchError, match=r"AWS: .*NoSuchRole"):
        estimator(role="NoSuchRole", code_location=location).fit(wait=False)
    with pytest.raises(LaunchError, match=r"AWS: .*NoSuchBucket"):
        estimator(code_location=location).fit(wait=False)


@pytest.mark.parametrize(
    ("raised", "fix"),
    [
        ("NoCredentialsError", "Unable to locate credentials. Run `aws configure`"),
        ("NoRegionError", "specify a region. Pass --region"),
        ("UnauthorizedSSOTokenError", "with `aws sso login`"),
        ("ConnectTimeoutError", "HTTPS_PROXY"),
        ("ExpiredToken", "The words. Log in again with `aws sso login`"),
        ("ExpiredTokenException", "Log in again with `aws sso login`"),
        ("InvalidClientTokenId", "The keys are wrong"),
        ("ValidationException", "The words"),
    ],
)
def test_what_aws_refuses_has_its_fix(raised: str, fix: str) -> None:
    """AWS's library raises its own errors, and the service's refusals have codes."""
    exceptions = pytest.importorskip("botocore.exceptions")

    def refuse(**_: Any) -> Any:
        if kind := getattr(exceptions, raised, None):
            raise kind(endpoint_url="https://there", error="late")
        raise exceptions.ClientError({"Error": {"Code": raised, "Message": "The words."}}, "Call")

    refusing = SimpleNamespace(list_objects_v2=refuse, describe_training_job=refuse)
    make, wait = client.make_bucket, client.wait
    for action in (lambda: make(refusing, BUCKET, "r", "1"), lambda: wait(refusing, NAME)):
        with pytest.raises(LaunchError) as caught:
            action()
        assert str(caught.value).startswith("AWS: ")
        assert fix in str(caught.value)


def test_a_machine_that_knows_no_keys_or_region(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    words = ["--role", COMMON["role"], "--image", "i", "--instance-type", "ml.c5.large", "train.py"]
    for more, message in (
        ([], "the AWS region is unknown. Pass region= (--region) or set AWS_REGION"),
        (["--region", "eu-west-1"], "AWS: Unable to locate credentials. Run `aws configure`"),
    ):
        done = sagemaker(*more, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"ringdance sagemaker: {message}")
        assert done.stderr.count("\n") == 1
    monkeypatch.setenv("AWS_PROFILE", "no-such")
    with pytest.raises(LaunchError, match=r"no-such.*aws configure list-profiles"):
        estimator().request()


def test_a_rank_for_each_gpu_unless_the_job_says_otherwise(
    aws: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    number, enabled = "sagemaker_mpi_num_of_processes_per_host", "sagemaker_mpi_enabled"
    for change, sent in (
        ({}, {number: "8", enabled: "true"}),
        ({"instance_count": 1}, {number: "8", enabled: "true"}),
        ({"distribution": {"mpi": {"enabled": True}}}, {number: "8", enabled: "true"}),
        ({"distribution": {"mpi": {"processes_per_host": 4}}}, {number: "4", enabled: "true"}),
        ({"instance_type": "ml.g5.12xlarge"}, {number: "4", enabled: "true"}),
        ({"instance_type": "ml.c5.xlarge"}, {number: "1", enabled: "true"}),
        ({"instance_type": "ml.c5.xlarge", "instance_count": 1}, {}),
        ({"distribution": {"mpi": {"enabled": False}}}, {enabled: "false"}),
    ):
        found = Estimator(**{**COMMON, **change}).request(None, NAME)["HyperParameters"]
        assert {name: found[name] for name in (number, enabled) if name in found} == sent, change
    unknown = {**COMMON, "instance_type": "ml.trn1.32xlarge"}
    with pytest.raises(ArgumentError, match=r"ml.trn1.32xlarge: .* Pass processes_per_host"):
        Estimator(**unknown)
    started = Estimator(**unknown, processes_per_host=32).started
    assert started == "2 x ml.trn1.32xlarge, 32 ranks per instance"
    Estimator(**COMMON).fit(wait=False, job_name=NAME)
    assert "2 x ml.p3.16xlarge (8 GPUs), 8 ranks per instance\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("-x A=1 -verbose", "-x A=1 -verbose"),
        ("--NCCL_DEBUG=INFO", "--NCCL_DEBUG=INFO"),
        ("--NCCL_SOCKET_IFNAME=eth0 -verbose", "-x NCCL_SOCKET_IFNAME=eth0 -verbose"),
        ("-HOROVOD_CYCLE_TIME=1", "-x HOROVOD_CYCLE_TIME=1"),
        ("A=1 -x B=2", "-x A=1 -x B=2"),
        ("A=1 -x  B=2", "-x A=1 -x B=2"),
        ("NCCL_DEBUG=WARN", "--NCCL_DEBUG=WARN"),
        ("--mca btl_tcp_if_include eth0", "--mca btl_tcp_if_include eth0"),
    ],
)
def test_options_that_are_none_of_mpirun(given: str, sent: str) -> None:
    options, notes = mpi_options(given)
    assert options == sent
    assert bool(notes) == (given != sent)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = estimator(distribution={"mpi": {"enabled": True, "custom_mpi_options": given}})
    assert [bool("mpirun" in str(item.message)) for item in caught] == [True] * len(notes)
    request = made.request(name=NAME)
    assert json.loads(request["HyperParameters"]["sagemaker_mpi_custom_mpi_options"]) == sent


@pytest.mark.filterwarnings("ignore:.*the same rows")
def test_pipe_mode_has_a_channel_for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    request = estimator(processes_per_host=3, input_mode="Pipe").request({"train": f"{S3}/train"}, NAME)
    names = [channel["ChannelName"] for channel in request["InputDataConfig"]]
    assert names == ["train_0", "train_1", "train_2"]
    mixed = {"train": Input(f"{S3}/t", input_mode="Pipe", shuffle_seed=5), "test": f"{S3}/v"}
    channels = estimator(processes_per_host=2).request(mixed, NAME)["InputDataConfig"]
    assert [channel["ChannelName"] for channel in channels] == ["train_0", "train_1", "test"]
    assert channels[0]["ShuffleConfig"] == {"Seed": 5}
    monkeypatch.setenv("SM_CHANNELS", json.dumps(["train_0", "train_1", "test"]))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    assert (worker_channel("train"), worker_channel("test")) == ("train_1", "test")
    with pytest.raises(ArgumentError, match="no channel 'other'"):
        worker_channel("other")


@pytest.mark.filterwarnings("error")
def test_workers_of_a_host_read_different_rows() -> None:
    made = estimator(processes_per_host=2, instance_count=3)
    parts = Input(f"{S3}/{{worker}}/", "s3shardbykey", input_mode="Pipe")
    channels = made.request({"t": parts}, NAME)["InputDataConfig"]
    sources = [channel["DataSource"]["S3DataSource"] for channel in channels]
    assert [source["S3Uri"] for source in sources] == [f"{S3}/0/", f"{S3}/1/"]
    assert {source["S3DataDistributionType"] for source in sources} == {"ShardedByS3Key"}
    channels = made.request({"t": Input(S3, input_mode="Pipe", shuffle_seed=7)}, NAME)["InputDataConfig"]
    assert [channel["ShuffleConfig"]["Seed"] for channel in channels] == [7, 8]
    with pytest.raises(UserWarning, match="the same rows in the same order"):
        made.request({"t": Input(S3, input_mode="Pipe")}, NAME)
    for text, expected in (
        (S3, Input(S3, "FullyReplicated")),
        (f"{S3}/a,b,distribution=S3ShardByKey", Input(f"{S3}/a,b", "ShardedByS3Key")),
        (f"{S3},shuffle_seed=3", Input(S3, shuffle_seed=3)),
    ):
        assert Input.parse(text) == expected
    with pytest.raises(ArgumentError, match="colour"):
        Input.parse(f"{S3},colour=red")
    with pytest.raises(ArgumentError, match="must be a non-negative integer"):
        Input.parse(f"{S3},shuffle_seed=two")


def test_parameter_servers_are_answered() -> None:
    estimator(distribution={"parameter_server": {"enabled": False}})
    with pytest.raises(ArgumentError) as caught:
        estimator(distribution={"parameter_server": {"enabled": True}})
    text = str(caught.value)
    assert "distribution={'mpi': {'enabled': True, 'processes_per_host': 4}}" in text
    assert "sharded=True" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": ""}, "role is missing"),
        ({"image_uri": ""}, "image_uri is missing"),
        ({"instance_type": ""}, "instance_type is missing"),
        ({"instance_type": "local_gpu"}, "ringdance run -np 8 python train.py"),
        ({"framework_version": "1.6.0"}, "'framework_version'; the SDK used it to look up an image"),
        ({"entry_point": "other.py"}, "other.py"),
        ({"instance_count": 0}, "instance_count is 0"),
        ({"processes_per_host": 0}, "processes_per_host is 0"),
        ({"use_spot_instances": True}, "max_wait"),
        ({"use_spot_instances": True, "max_wait": 10}, "max_wait"),
        ({"max_wait": 10**6}, "use_spot_instances"),
        ({"subnets": ["s"]}, "security_group_ids"),
        ({"colour": "red"}, "colour"),
        ({"distribution": {"smdistributed": {}}}, "smdistributed"),
        ({"distribution": {"mpi": {"processes": 8}}}, "processes"),
        ({"distribution": {"mpi": {"processes_per_host": 4}}}, "is 8, but"),
        ({"distribution": {"mpi": {"custom_mpi_options": "-x A='1"}}}, "custom_mpi_options"),
        ({"train_instance_type": "ml.c5.large"}, "'train_instance_type'; it is now called instance_type"),
        ({"distributions": {}}, "it is now called distribution"),
        ({"image_name": "i:1"}, "it is now called image_uri"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        estimator(**change)
    assert message in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*the same rows")
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"a": Input("s3://b/c", "Everywhere")}, "Everywhere"),
        ({"a": Input("s3://b/c", input_mode="Tape")}, "Tape"),
        ({name: Input("s3://b/c", input_mode="Pipe") for name in "abc"}, "allows 20"),
    ],
)
def test_bad_channels(inputs: dict[str, Input], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        estimator().request(inputs, NAME)


def test_spot_without_checkpoints_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="checkpoint_s3_uri"):
        estimator(use_spot_instances=True, max_wait=10**6)


def test_names_of_jobs_are_what_the_service_takes() -> None:
    for base in ("train", "my_train.v2", "x" * 100, "__"):
        name = job_name(base)
        assert len(name) <= 63
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def sagemaker(*words: str) -> subprocess.CompletedProcess[str]:
    return run_forked(main, ["ringdance", "sagemaker", "submit", *words])


def test_the_command_line_s_dry_run_prints_the_request() -> None:
    done = sagemaker(
        "--dry-run", "--role", COMMON["role"], "--image", COMMON["image_uri"], "--instance-type",
        "ml.p3.16xlarge", "--instance-count", "2", "--processes-per-host", "8", "--name", NAME,
        "--mpi-options=--A=1", "-x", "B=2", "--input", f"train={S3}/train,distribution=s3shardbykey",
        "--metric", "loss=loss=(.*)",
        "train.py", "--epochs", "3", "--lr=0.1", "--name", "a",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout)
    same = estimator(
        distribution={"mpi": {"custom_mpi_options": "-x A=1"}},
        hyperparameters={"epochs": 3, "lr": 0.1, "name": "a"},
        metric_definitions=[{"Name": "loss", "Regex": "loss=(.*)"}],
        environment={"B": "2"},
    )
    assert request == same.request({"train": Input(f"{S3}/train", "ShardedByS3Key")}, NAME)
    assert "not an option of mpirun" in done.stderr
    assert "2 x ml.p3.16xlarge (8 GPUs), 8 ranks per instance\n" in done.stderr


def test_secrets_are_not_put_into_the_request() -> None:
    common = ["--dry-run", "--role", COMMON["role"], "--image", COMMON["image_uri"]]
    service = [*common, "--instance-type", "ml.c5.xlarge"]
    for name, words in (
        ("HF_TOKEN", ["-x", "HF_TOKEN=hunter2", "train.py"]),
        ("hf-token", ["-x", "MAX_TOKENS=4096", "train.py", "--hf-token", "hunter2"]),
    ):
        done = sagemaker(*service, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert f": {name} holds what looks like a secret" in done.stderr
        assert "secretsmanager" in done.stderr
        assert f"If it is not a secret, pass --plain {name}" in done.stderr
        assert "hunter2" not in done.stderr
        done = sagemaker(*service, "--plain", name, *words)
        assert (done.returncode, f'"{name}": "(not shown)"' in done.stdout) == (0, True), done.stderr
        assert "hunter2" not in done.stdout
    with pytest.warns(UserWarning, match="hf-token holds what looks like a secret"):
        estimator(hyperparameters={"hf-token": "hunter2"})
    with pytest.warns(UserWarning, match="HF_TOKEN holds what looks like a secret"):
        estimator(environment={"HF_TOKEN": "hunter2"})
    with pytest.warns(UserWarning, match="custom_mpi_options holds what looks like a secret"):
        estimator(custom_mpi_options="-x HF_TOKEN=hunter2")


def test_the_command_line_reports_mistakes() -> None:
    done = sagemaker("--dry-run", "--instance-type", "ml.c5.xlarge", "train.py")
    assert (done.returncode, "role is missing" in done.stderr) == (2, True)
    for words in (["--verbose"], ["data", "1"], ["--a", "--b", "1"]):
        with pytest.raises(LaunchError):
            hyperparameters(words)
    assert hyperparameters(["--a=x=1", "--b", "-3", "--c", "true"]) == {"a": "x=1", "b": -3, "c": True}


def test_without_boto3_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(LaunchError, match="-m pip install boto3"):
        estimator().fit(wait=False)
