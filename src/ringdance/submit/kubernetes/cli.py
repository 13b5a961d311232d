"""The command line of ``ringdance k8s``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ringdance import subcommands
from ringdance.errors import LaunchError, optional
from ringdance.job_files import read_yaml
from ringdance.launch.parser import positive
from ringdance.search.space import read_space
from ringdance.subcommands import Subcommand
from ringdance.submit.kubernetes.convert import convert
from ringdance.submit.kubernetes.job import Document, JobRequest
from ringdance.submit.kubernetes.katib import experiment
from ringdance.submit.kubernetes.manifest import manifest
from ringdance.submit.options import add_options, from_arguments

_DESCRIPTION = "Manifests for Kubernetes, with the MPI operator or Kubeflow Trainer. kubectl submits them."
_EXAMPLES = """\
examples:
  ringdance k8s manifest --image registry/train:1 --workers 4 --gpus 8 -- python train.py > job.yaml
  kubectl create -f job.yaml
  ringdance k8s convert old-mpijob.yaml > job.yaml
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance k8s`` with the words after it; returns the exit code."""
    return subcommands.run("ringdance k8s", _DESCRIPTION, _SUBCOMMANDS, argv, _EXAMPLES)


# --- arguments -------------------------------------------------------------------------------------


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON (default: YAML)")


def _add_manifest(parser: argparse.ArgumentParser) -> None:
    add_options(parser, JobRequest)
    _add_json(parser)
    text = "write a Katib Experiment of such jobs instead; SPACE.yaml is the file of `ringdance search`"
    parser.add_argument("--katib", type=Path, metavar="SPACE.yaml", help=text)
    text = "with --katib: trials side by side (default 2)"
    parser.add_argument("--parallel", type=positive, default=2, metavar="N", help=text)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="- for standard input")
    _add_json(parser)


# --- files -----------------------------------------------------------------------------------------


def _print(documents: Sequence[Document], as_json: bool) -> None:
    if as_json:
        # Several documents as the list that kubectl takes.
        several = {"apiVersion": "v1", "kind": "List", "items": documents}
        print(json.dumps(documents[0] if len(documents) == 1 else several, indent=2))
        return
    copies = json.loads(json.dumps(documents, default=str))  # else what they share becomes an anchor
    yaml = optional("yaml", LaunchError, "YAML needs PyYAML", "pyyaml", " (or use --json)")
    print(yaml.safe_dump_all(copies, sort_keys=False, width=110), end="")


def _read(file: str) -> list[Document]:
    """Read the documents of a file of YAML or JSON."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise LaunchError(
            f"{file}: byte {data[error.start]:#x} at position {error.start} (line {line}) is no UTF-8; "
            f"convert the file, as in: iconv -f latin1 -t utf-8 {file}"
        ) from None
    try:
        found = [json.loads(text)]
    except ValueError:
        try:  # Kubernetes too reads YAML 1.1: 0644 is a mode
            found = [document for document in read_yaml(text, old=True) if document is not None]
        except ValueError as error:
            raise LaunchError(f"{file}: neither YAML nor JSON: {error}") from None
    documents: list[Document] = []
    for document in found:
        if not isinstance(document, dict) or "kind" not in document:
            raise LaunchError(f"{file}: contains something that is not a Kubernetes object")
        documents += document.get("items") or [] if document["kind"] == "List" else [document]
    if not documents:
        raise LaunchError(f"{file}: it is empty")
    return documents


# --- subcommands -----------------------------------------------------------------------------------


def _manifest(arguments: argparse.Namespace) -> int:
    job, file = from_arguments(JobRequest, arguments), arguments.katib
    documents = [experiment(read_space(file), job, arguments.parallel)] if file else manifest(job)
    _print(documents, arguments.json)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    documents = []
    for document in _read(arguments.file):
        if document.get("kind") == "MPIJob":
            name = (document.get("metadata") or {}).get("name", "MPIJob")
            try:
                document, notes = convert(document)
            except LaunchError as error:
                raise LaunchError(f"{arguments.file}: {name}: {error}") from None
            for note in notes:
                print(f"{name}: {note}", file=sys.stderr)
        documents.append(document)
    _print(documents, arguments.json)
    return 0


_SUBCOMMANDS = {
    "manifest": Subcommand(_manifest, "write the manifest of a job", _add_manifest),
    "convert": Subcommand(
        _convert, "convert an old MPIJob (v1alpha1, v1alpha2, v1) to v2beta1", _add_convert
    ),
}
