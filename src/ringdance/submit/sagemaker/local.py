"""A SageMaker job on this machine: a container's folders and files are laid out, then its own toolkit runs.

The toolkit is the package sagemaker-training, which the images of SageMaker start as ``train``. It reads the
folder's files, calls ``mpirun``, and writes success or failure. Two things are other than in a container:
it starts no ssh server (there is one host), and ``mpirun`` is the launcher of this package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ringdance.errors import ArgumentError, LaunchError
from ringdance.submit.sagemaker.request import Input, Inputs, Job, as_channels

_HOST = "localhost"  # the toolkit waits until the name resolves


def run(job: Job, files: str, name: str, inputs: Inputs, distributed: bool) -> Path:
    """Run the job `name` to its end; the folder that stands for ``/opt/ml``.

    Args:
        job: what to run; its `instance_type` is "local".
        files: the script, or the folder that holds it.
        name: of the job.
        inputs: channels; ``file://`` and a folder, or a plain path.
        distributed: whether the job asked for MPI.

    Raises:
        ArgumentError: a channel is not here, or the job wants several hosts.
        LaunchError: the toolkit is not installed, or the job failed: with what it reported.
    """
    if job.instance_count != 1:
        raise ArgumentError(
            f"instance_count {job.instance_count}: local mode has one host; give processes_per_host instead"
        )
    if importlib.util.find_spec("sagemaker_training") is None:
        raise LaunchError(
            "local mode runs SageMaker's own toolkit: pip install sagemaker-training (it needs a C compiler)"
        )
    folder = Path(tempfile.mkdtemp(prefix="ringdance-sagemaker-"))
    _lay_out(folder, job, files, name, inputs, distributed)
    print(f"ringdance: {name} runs here; {folder} stands for /opt/ml", flush=True)
    environ = {
        **os.environ,
        **job.environment,
        "SAGEMAKER_BASE_DIR": str(folder),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        # A value for the container's path is of no use where the folder is another one.
        **{
            k: v.replace("/opt/ml", str(folder))
            for k, v in job.environment.items()
            if v.startswith("/opt/ml")
        },
    }
    words = [sys.executable, "-m", "ringdance.submit.sagemaker.container"]
    code = subprocess.run(words, env=environ, check=False).returncode
    failure = folder / "output" / "failure"
    if code or failure.exists():
        reason = failure.read_text(errors="replace").strip() if failure.exists() else f"exit code {code}"
        raise LaunchError(f"training job {name} failed: {reason}\n(see {folder})")
    _hand_over(folder, job.output_path)
    return folder


def _lay_out(folder: Path, job: Job, files: str, name: str, inputs: Inputs, distributed: bool) -> None:
    for part in ("input/config", "input/data", "model", "output/data", "checkpoints", "bin"):
        (folder / part).mkdir(parents=True)
    code = folder / "code"
    if os.path.isdir(files):
        shutil.copytree(files, code, ignore=shutil.ignore_patterns("__pycache__", ".git"))
    else:
        code.mkdir()
        shutil.copy(files, code)
    channels = as_channels(inputs)
    for channel, given in channels.items():
        (folder / "input" / "data" / channel).symlink_to(_local(channel, given))
    parameters = job.all_hyperparameters(name)
    if not distributed:
        del parameters["sagemaker_mpi_enabled"]
    parameters["sagemaker_submit_directory"] = str(code)
    if job.model_dir:
        parameters["model_dir"] = job.model_dir.replace("/opt/ml", str(folder))
    groups = [{"instance_group_name": "homogeneousCluster", "instance_type": "local", "hosts": [_HOST]}]
    config = {
        "hyperparameters": {k: json.dumps(v) for k, v in parameters.items()},
        "inputdataconfig": {
            channel: {"TrainingInputMode": "File", "S3DistributionType": given.distribution}
            for channel, given in channels.items()
        },
        "resourceconfig": {
            "current_host": _HOST, "hosts": [_HOST], "network_interface_name": "lo",
            "current_instance_type": "local", "current_group_name": "homogeneousCluster",
            "instance_groups": groups,
        },
    }  # fmt: skip
    for title, content in config.items():
        (folder / "input" / "config" / f"{title}.json").write_text(json.dumps(content))
    mpirun = folder / "bin" / "mpirun"
    mpirun.write_text(mpirun_script())
    mpirun.chmod(0o755)


def mpirun_script() -> str:
    """The program that the toolkit takes for mpirun."""
    words = [sys.executable, "-m", "ringdance.submit.sagemaker.container"]
    return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'


def _local(channel: str, given: Input) -> Path:
    if given.s3_data.startswith("s3://"):
        raise ArgumentError(
            f"channel {channel!r}: local mode reads folders of this machine, not {given.s3_data}; copy it "
            "(aws s3 cp --recursive) and give file:///FOLDER"
        )
    path = Path(given.s3_data.removeprefix("file://")).absolute()
    if not path.exists():
        raise ArgumentError(f"channel {channel!r}: {path} does not exist")
    return path


def _hand_over(folder: Path, output: str | None) -> None:
    """Copy model and output to where the job wants them, if that is a folder of this machine."""
    if output is None or output.startswith("s3://"):
        return
    target = Path(output.removeprefix("file://"))
    for part, title in (("model", "model"), ("output/data", "output")):
        shutil.copytree(folder / part, target / title, dirs_exist_ok=True)
