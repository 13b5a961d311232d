"""The command line of ``ringdance k8s``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ringdance import subcommands
from ringdance.errors import LaunchError, optional
from ringdance.launch.parser import positive
from ringdance.search.space import read_space
from ringdance.subcommands import Subcommand
from ringdance.submit.kubernetes.job import Document, JobRequest
from ringdance.submit.kubernetes.katib import experiment
from ringdance.submit.kubernetes.manifest import manifest
from ringdance.submit.options import add_options, from_arguments

_DESCRIPTION = "Manifests for Kubernetes, with the MPI operator or Kubeflow Trainer. kubectl submits them."
_EXAMPLES = """\
examples:
  ringdance k8s manifest --image registry/train:1 --workers 4 --gpus 8 -- python train.py > job.yaml
  kubectl create -f job.yaml
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance k8s`` with the words after it; returns the exit code."""
    return subcommands.run("ringdance k8s", _DESCRIPTION, _SUBCOMMANDS, argv, _EXAMPLES)


# --- arguments -------------------------------------------------------------------------------------


def _add_manifest(parser: argparse.ArgumentParser) -> None:
    add_options(parser, JobRequest)
    text = "write a Katib Experiment of such jobs instead; SPACE.yaml is the file of `ringdance search`"
    parser.add_argument("--katib", type=Path, metavar="SPACE.yaml", help=text)
    text = "with --katib: trials side by side (default 2)"
    parser.add_argument("--parallel", type=positive, default=2, metavar="N", help=text)


# --- output -----------------------------------------------------------------------------------------


def _print(documents: Sequence[Document]) -> None:
    copies = json.loads(json.dumps(documents, default=str))  # else what they share becomes an anchor
    yaml = optional("yaml", LaunchError, "YAML needs PyYAML", "pyyaml")
    print(yaml.safe_dump_all(copies, sort_keys=False, width=110), end="")


# --- subcommands -----------------------------------------------------------------------------------


def _manifest(arguments: argparse.Namespace) -> int:
    job, file = from_arguments(JobRequest, arguments), arguments.katib
    _print([experiment(read_space(file), job, arguments.parallel)] if file else manifest(job))
    return 0


_SUBCOMMANDS = {"manifest": Subcommand(_manifest, "write the manifest of a job", _add_manifest)}
