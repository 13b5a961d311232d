"""Run a SageMaker job on this machine: lay out a container's directories, then run its own toolkit.

The toolkit is the package sagemaker-training, which the images of SageMaker start as ``train``. It reads the
files of ``/opt/ml``, calls ``mpirun``, and writes success or failure. Two things differ from a container:
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
from typing import Any

from ringdance.errors import ArgumentError, LaunchError, pip_install
from ringdance.submit.sagemaker.job import NOT_UPLOADED, TrainingJob
from ringdance.submit.sagemaker.request import Input, Inputs, as_channels, hyperparameters

_HOST = "localhost"  # the toolkit waits until the name resolves


def _container() -> list[str]:
    return [sys.executable, "-m", "ringdance.submit.sagemaker.container"]


def run(job: TrainingJob, name: str, inputs: Inputs, region: str) -> None:
    """Run the job `name` to its end.

    Args:
        job: what to run; its `instance_type` is "local".
        name: of the job.
        inputs: channels; ``file://`` and a directory, or a plain path.
        region: for the script's variables.

    Raises:
        ArgumentError: a channel does not exist, or the job wants several hosts.
        LaunchError: the toolkit is not installed, or the job failed: with what it reported.
    """
    if job.instance_count != 1:
        raise ArgumentError(
            f"instance_count {job.instance_count}: local mode has one host; give processes_per_host "
            "instead"
        )
    if importlib.util.find_spec("sagemaker_training") is None:
        raise LaunchError(
            f"local mode runs SageMaker's own toolkit: {pip_install('sagemaker-training')} "
            "(it needs a C compiler)"
        )
    root = Path(tempfile.mkdtemp(prefix="ringdance-sagemaker-"))
    _lay_out(root, job, name, inputs, region)
    print(f"ringdance: {name} runs on this machine, with {root} as /opt/ml", flush=True)
    environ = {
        **os.environ,
        **{k: _moved(v, root) for k, v in (job.environment or {}).items()},
        "SAGEMAKER_BASE_DIR": str(root),
        "PATH": f"{root / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    code = subprocess.run(_container(), env=environ, check=False).returncode
    failure = root / "output" / "failure"
    if code or failure.exists():
        reason = failure.read_text(errors="replace").strip() if failure.exists() else f"exit code {code}"
        raise LaunchError(f"training job {name} failed: {reason}\n(see {root})")
    if job.output_path and not job.output_path.startswith("s3://"):
        target = Path(job.output_path.removeprefix("file://"))
        for part, title in (("model", "model"), ("output/data", "output")):
            shutil.copytree(root / part, target / title, dirs_exist_ok=True)


def _moved(value: str, root: Path) -> str:
    """Replace the container's ``/opt/ml`` at the beginning of a variable's value."""
    return value.replace("/opt/ml", str(root)) if value.startswith("/opt/ml") else value


def _lay_out(root: Path, job: TrainingJob, name: str, inputs: Inputs, region: str) -> None:
    for part in ("input/config", "input/data", "model", "output/data", "checkpoints", "bin"):
        (root / part).mkdir(parents=True)
    code = root / "code"
    if os.path.isdir(job.files):
        shutil.copytree(job.files, code, ignore=shutil.ignore_patterns(*NOT_UPLOADED))
    else:
        code.mkdir()
        shutil.copy(job.files, code)
    channels = as_channels(inputs)
    for channel, given in channels.items():
        (root / "input" / "data" / channel).symlink_to(_directory(channel, given))
    parameters = hyperparameters(job, name, str(code), region)
    if job.model_dir:
        parameters["model_dir"] = job.model_dir.replace("/opt/ml", str(root))
    config: dict[str, Any] = {
        "hyperparameters": {k: json.dumps(v) for k, v in parameters.items()},
        "inputdataconfig": {
            channel: {"TrainingInputMode": "File", "S3DistributionType": given.distribution}
            for channel, given in channels.items()
        },
        "resourceconfig": {"current_host": _HOST, "hosts": [_HOST], "network_interface_name": "lo"},
    }
    for title, content in config.items():
        (root / "input" / "config" / f"{title}.json").write_text(json.dumps(content))
    mpirun = root / "bin" / "mpirun"
    mpirun.write_text(mpirun_script())
    mpirun.chmod(0o755)


def mpirun_script() -> str:
    """Return the program that the toolkit starts as mpirun."""
    return f'#!/bin/sh\nexec {shlex.join(_container())} "$@"\n'


def _directory(channel: str, given: Input) -> Path:
    if given.s3_data.startswith("s3://"):
        raise ArgumentError(
            f"channel {channel!r}: local mode reads directories of this machine, not {given.s3_data}; copy "
            "it (aws s3 cp --recursive) and give file:///DIR"
        )
    path = Path(given.s3_data.removeprefix("file://")).absolute()
    if not path.exists():
        raise ArgumentError(f"channel {channel!r}: {path} does not exist")
    return path
