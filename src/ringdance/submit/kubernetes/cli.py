"""The command line of ``ringdance k8s``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ringdance.errors import LaunchError, optional
from ringdance.launch import subcommands
from ringdance.launch.subcommands import Subcommand
from ringdance.submit.kubernetes.job import JobRequest
from ringdance.submit.kubernetes.manifest import manifest
from ringdance.submit.options import add_options, from_arguments

_DESCRIPTION = "Write Kubernetes manifests for the MPI operator or Kubeflow Trainer, for use with kubectl."
_EXAMPLES = """\
examples:
  ringdance k8s manifest --image registry/train:1 --workers 4 --gpus 8 -- python train.py > job.yaml
  kubectl create -f job.yaml
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance k8s`` with the arguments ``argv``. Returns the exit code."""
    write = Subcommand(_manifest, "write a job's manifest", lambda parser: add_options(parser, JobRequest))
    return subcommands.run("ringdance k8s", _DESCRIPTION, {"manifest": write}, argv, _EXAMPLES)


def _manifest(arguments: argparse.Namespace) -> int:
    documents = manifest(from_arguments(JobRequest, arguments))
    copies = json.loads(json.dumps(documents))  # shared objects would become YAML anchors
    yaml = optional("yaml", LaunchError, "YAML needs PyYAML", "pyyaml")
    print(yaml.safe_dump_all(copies, sort_keys=False, width=110), end="")
    return 0
