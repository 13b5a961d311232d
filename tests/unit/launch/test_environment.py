"""Which variables other hosts receive, and which values are never shown."""

from __future__ import annotations

import pytest

from ringdance.errors import LaunchError
from ringdance.launch.mpi.mpirun import parse
from ringdance.launch.remote.environment import forwarded, is_secret, shown_text
from ringdance.submit.kubernetes.job import JobRequest
from ringdance.submit.sagemaker.request import mpi_options

OWN = {
    "PATH": "/bin", "WANDB_API_KEY": "k", "AWS_REGION": "eu", "AWS_SECRET_ACCESS_KEY": "s", "HOME": "/h",
    "RINGDANCE_CYCLE_TIME": "2", "RINGDANCE_JOB": "j", "OMPI_MCA_btl": "tcp", "spark.env-1": "x",
}  # fmt: skip
SETTINGS = {"RINGDANCE_CYCLE_TIME", "OMPI_MCA_btl"}


def test_what_other_hosts_get() -> None:
    assert forwarded(OWN).keys() == OWN.keys() - {"HOME", "RINGDANCE_JOB"}
    assert forwarded(OWN, everything=False).keys() == SETTINGS


def test_what_names_files_of_this_machine_stays_here() -> None:
    names = ("KRB5CCNAME", "XAUTHORITY", "ICEAUTHORITY", "TMP", "TEMP", "TEMPDIR", "TMPDIR", "GPG_TTY")
    assert not forwarded(dict.fromkeys(names, "/tmp/x"))


SECRETS = (
    "HF_TOKEN", "AWS_ACCESS_KEY_ID", "DB_PASSWORD", "db_pwd", "GOOGLE_APPLICATION_CREDENTIALS",
    "SSH_PRIVATE_KEY", "WANDB_API_KEY", "OPENAI_APIKEY", "NGC_AUTH", "AZURE_STORAGE_CONNECTION_STRING",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_what_may_be_secret_is_shown_nowhere(name: str) -> None:
    assert is_secret(name)
    for text in (
        shown_text(f"mpirun -x {name}=hunter2 -np 2"),
        *parse([f"--{name.upper()}=hunter2", "true"], {}).notes,
        *mpi_options(f"--{name.upper()}=hunter2")[1],
    ):
        assert name.lower() in text.lower()
        assert "hunter2" not in text
    with pytest.raises(LaunchError, match="looks like a secret"):
        JobRequest(command=["true"], image="i", name="n", env={name: "hunter2"}).check()


@pytest.mark.parametrize("value", ["hunter2", '"hunter2"', "'a hunter2'", r"\"a hunter2\"", '"hunter2'])
def test_quoted_values_are_not_shown(value: str) -> None:
    for name in ("WANDB_API_KEY", "--api-key", "HF_TOKENS"):
        assert shown_text(f"-x {name}={value}") == f"-x {name}=(not shown)"
    assert shown_text(f"-x A_KEY={value} -x B=1").endswith("(not shown) -x B=1") or value == '"hunter2'


def test_what_is_no_secret_is_shown() -> None:
    for text in (
        "TOKENIZERS_PARALLELISM=false", "OMP_NUM_THREADS=2", "AUTHOR=me", "MAX_TOKENS=4096",
        "NUM_TOKENS=1.5B", "tokens-per-batch=8192", "SORT_KEY=name", "image-key=jpg", "AUTHENTICATED=me",
        "PRIVATE_DATASET=a/b", "USE_AUTH=true",
    ):  # fmt: skip
        assert not is_secret(*text.split("="))
        assert shown_text(f"-x {text}") == f"-x {text}"
    assert is_secret("HTTPS_PROXY", "http://me:hunter2@proxy:80")
    assert not is_secret("HTTPS_PROXY", "http://proxy:80")
