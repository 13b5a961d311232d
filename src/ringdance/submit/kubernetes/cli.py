"""The command line of ``ringdance k8s``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringdance import subcommands
from ringdance.errors import LaunchError, optional
from ringdance.launch.parser import positive
from ringdance.search.space import read_space
from ringdance.subcommands import Subcommand
from ringdance.submit.kubernetes.convert import convert
from ringdance.submit.kubernetes.job import Document, JobRequest
from ringdance.submit.kubernetes.katib import experiment
from ringdance.submit.kubernetes.kubectl import Kubectl, delete, logs, submit
from ringdance.submit.kubernetes.manifest import manifest
from ringdance.submit.options import add_options, from_arguments

_DESCRIPTION = "Training on Kubernetes, with the MPI operator or Kubeflow Trainer."
_EXAMPLES = """\
examples:
  ringdance k8s manifest --image registry/train:1 --workers 4 --gpus 8 -- python train.py > job.yaml
  ringdance k8s submit --name resnet --image registry/train:1 --workers 4 --follow -- python train.py
  ringdance k8s submit -f job.yaml
  ringdance k8s convert old-mpijob.yaml > job.yaml
  ringdance k8s logs resnet --follow
  ringdance k8s delete resnet
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance k8s`` with the words after it; returns the exit code."""
    return subcommands.run("ringdance k8s", _DESCRIPTION, _SUBCOMMANDS, argv, _EXAMPLES)


# --- arguments -------------------------------------------------------------------------------------


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON (default: YAML)")


def _add_kubectl(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--context", default="", help="kubectl's context, default: its current one")
    add("--wait", type=float, default=600.0, metavar="S", help="seconds to wait for the start (default 600)")


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("-n", "--namespace", default="", help="default: that of kubectl's context")
    _add_kubectl(parser)


def _add_manifest(parser: argparse.ArgumentParser) -> None:
    add_options(parser, JobRequest)
    _add_json(parser)
    text = "write a Katib Experiment of such jobs instead; SPACE.yaml is the file of `ringdance search`"
    parser.add_argument("--katib", type=Path, metavar="SPACE.yaml", help=text)
    text = "with --katib: trials side by side (default 2)"
    parser.add_argument("--parallel", type=positive, default=2, metavar="N", help=text)


def _add_submit(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-f", "--file", metavar="FILE", help="submit this manifest (- for standard input)")
    add("--follow", action="store_true", help="then show the job's output until its end")
    add_options(parser, JobRequest)
    _add_kubectl(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="- for standard input")
    _add_json(parser)


def _add_logs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-f", "--follow", action="store_true", help="wait for the start, and show the output until the end")
    add("--workers", action="store_true", help="of the workers' ssh daemons instead")
    _add_name(parser)


# --- files -----------------------------------------------------------------------------------------


def _yaml() -> Any:
    return optional("yaml", LaunchError, "YAML needs PyYAML", "pyyaml", " (or use --json)")


def _print(documents: Sequence[Document], as_json: bool) -> None:
    if as_json:
        # Several documents as the list that kubectl takes.
        several = {"apiVersion": "v1", "kind": "List", "items": documents}
        print(json.dumps(documents[0] if len(documents) == 1 else several, indent=2))
        return
    copies = json.loads(json.dumps(documents, default=str))  # else what they share becomes an anchor
    print(_yaml().safe_dump_all(copies, sort_keys=False, width=110), end="")


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
        yaml = _yaml()
        try:
            found = [document for document in yaml.safe_load_all(text) if document is not None]
        except yaml.YAMLError as error:
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


def _submit(arguments: argparse.Namespace) -> int:
    if bool(arguments.file) == bool(arguments.image):
        raise LaunchError("give either -f FILE, or --image IMAGE and a command")
    if arguments.file and arguments.command:
        raise LaunchError("-f FILE: the command is in the file; change it there")
    kubectl = Kubectl(arguments.namespace, arguments.context)
    if arguments.file:
        documents = _read(arguments.file)
    else:
        documents = manifest(from_arguments(JobRequest, arguments))
    print(submit(documents, kubectl), end="", flush=True)
    if arguments.follow:
        return logs(documents[-1]["metadata"]["name"], kubectl, follow=True, timeout=arguments.wait)
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


def _logs(arguments: argparse.Namespace) -> int:
    kubectl = Kubectl(arguments.namespace, arguments.context)
    return logs(arguments.name, kubectl, arguments.follow, arguments.workers, arguments.wait)


def _delete(arguments: argparse.Namespace) -> int:
    print(delete(arguments.name, Kubectl(arguments.namespace, arguments.context)), end="")
    return 0


_SUBCOMMANDS = {
    "manifest": Subcommand(_manifest, "write the manifest of a job", _add_manifest),
    "submit": Subcommand(_submit, "write a manifest and submit it", _add_submit),
    "convert": Subcommand(
        _convert, "convert an old MPIJob (v1alpha1, v1alpha2, v1) to v2beta1", _add_convert
    ),
    "logs": Subcommand(_logs, "show a job's output", _add_logs),
    "delete": Subcommand(_delete, "end a job and delete it with its pods", _add_name),
}
