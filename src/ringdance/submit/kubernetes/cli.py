"""The command line of ``ringdance k8s``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser
from ringdance.launch.spec import CommandError, as_program, parse_exports
from ringdance.submit.kubernetes.convert import convert
from ringdance.submit.kubernetes.kubectl import Kubectl, delete, logs, submit
from ringdance.submit.kubernetes.manifest import (
    IMPLEMENTATIONS,
    KINDS,
    Document,
    JobRequest,
    manifest,
    parse_volume,
)

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
    """``ringdance k8s``: `argv` without the program and ``k8s``; returns the exit code."""
    return as_program("ringdance k8s", lambda: _main(list(argv)))


def _main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    action: Any = arguments.action
    return int(action(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ringdance k8s",
        description="Training on Kubernetes, by the MPI operator or Kubeflow Trainer.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")
    write = commands.add_parser("manifest", help="write the manifest of a job", allow_abbrev=False)
    _add_request(write, needed=True)
    write.add_argument("--format", choices=("yaml", "json"), default="yaml", help="default: yaml")
    write.set_defaults(action=_manifest)
    send = commands.add_parser("submit", help="write a manifest and submit it", allow_abbrev=False)
    send.add_argument("-f", "--file", metavar="FILE", help="submit this manifest (- for standard input)")
    send.add_argument("--follow", action="store_true", help="then show the job's output as it comes")
    _add_request(send, needed=False)
    _add_cluster(send, namespace=False)
    send.set_defaults(action=_submit)
    old = commands.add_parser("convert", help="bring an old MPIJob (v1alpha1, v1alpha2, v1) up to v2beta1")
    old.add_argument("file", metavar="FILE", help="- for standard input")
    old.add_argument("--format", choices=("yaml", "json"), default="yaml", help="default: yaml")
    old.set_defaults(action=_convert)
    show = commands.add_parser("logs", help="show a job's output")
    show.add_argument("name", metavar="NAME")
    show.add_argument(
        "-f", "--follow", action="store_true", help="wait for it to start, and show it as it comes"
    )
    show.add_argument("--workers", action="store_true", help="of the workers' ssh daemons instead")
    _add_cluster(show)
    show.set_defaults(action=_logs)
    remove = commands.add_parser("delete", help="end a job and delete it with its pods")
    remove.add_argument("name", metavar="NAME")
    _add_cluster(remove)
    remove.set_defaults(action=_delete)
    return parser


def _add_cluster(parser: argparse.ArgumentParser, namespace: bool = True) -> None:
    if namespace:
        parser.add_argument("-n", "--namespace", default="", help="default: that of kubectl's context")
    parser.add_argument("--context", default="", help="kubectl's context, default: its current one")
    parser.add_argument(
        "--wait", type=float, default=600.0, metavar="S", help="seconds to wait for the start (default 600)"
    )


def _add_request(parser: argparse.ArgumentParser, needed: bool) -> None:
    def add(*names: str, **details: Any) -> None:
        parser.add_argument(*names, **details)

    defaults = {name: field.default for name, field in JobRequest.__dataclass_fields__.items()}

    def number(name: str, text: str) -> None:
        add(
            f"--{name}",
            type=int,
            default=defaults[name],
            metavar="N",
            help=f"{text} (default {defaults[name]})",
        )

    add("--kind", choices=KINDS, default="MPIJob", help="default: MPIJob, of the MPI operator")
    add("--name", default="train", help="of the job (default: train)")
    add("--image", required=needed, help="container image, with ringdance, your packages, ssh and sshd")
    number("workers", "worker pods")
    add("--slots", type=int, metavar="N", help="ranks on each worker (default: its GPUs, else 1)")
    number("gpus", "GPUs of each worker")
    add("--cpus", default="", metavar="N", help="cores of each worker")
    add("--memory", default="", metavar="SIZE", help="of each worker, such as 32Gi")
    add(
        "--launcher-memory", default=defaults["launcher_memory"], metavar="SIZE", help="of the launcher (1Gi)"
    )
    add("--shm", default=defaults["shm"], metavar="SIZE", help="size of /dev/shm (default 2Gi)")
    add("--volume", action="append", default=[], metavar="KIND:WHAT:PATH[:ro]",
        help="pvc:CLAIM:/data, nfs:SERVER:/EXPORT:/data, host:/FOLDER:/data, configmap:NAME:/x, "
        "secret:NAME:/x, empty:SIZE:/scratch")  # fmt: skip
    add("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="variable of the ranks")
    add("--secret-env", action="append", default=[], metavar="NAME=SECRET/KEY",
        help="variable of the ranks whose value is in a Secret")  # fmt: skip
    add("-n", "--namespace", default="", help="default: that of kubectl's context")
    add("--mpi", choices=IMPLEMENTATIONS, default="OpenMPI", help="of the image (default: OpenMPI)")
    number("retries", "new starts of the launcher after a failure")
    add("--limit", type=int, metavar="S", help="seconds after which the job is ended (default: none)")
    number("keep", "seconds for which the ended job and its log stay")
    add("--node-selector", action="append", default=[], metavar="LABEL=VALUE", help="of the workers' nodes")
    add("--pull-secret", action="append", default=[], metavar="NAME", help="Secret for the image's registry")
    add("--service-account", default="", metavar="NAME", help="of the pods")
    add("command", nargs="*", metavar="COMMAND", help="behind --: what each rank runs")


def _request(arguments: argparse.Namespace) -> JobRequest:
    return JobRequest(
        name=arguments.name,
        image=arguments.image,
        command=arguments.command,
        workers=arguments.workers,
        slots=arguments.slots if arguments.slots is not None else max(arguments.gpus, 1),
        gpus=arguments.gpus,
        cpus=arguments.cpus,
        memory=arguments.memory,
        shm=arguments.shm,
        volumes=[parse_volume(text) for text in arguments.volume],
        env=parse_exports(arguments.env, os.environ),
        secret_env={
            name: _secret(name, value) for name, value in _pairs("--secret-env", arguments.secret_env)
        },
        namespace=arguments.namespace,
        mpi=arguments.mpi,
        retries=arguments.retries,
        limit=arguments.limit,
        keep=arguments.keep,
        node_selector=dict(_pairs("--node-selector", arguments.node_selector)),
        pull_secrets=arguments.pull_secret,
        service_account=arguments.service_account,
        launcher_memory=arguments.launcher_memory,
    )


def _pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    for text in texts:
        if not text.partition("=")[0] or "=" not in text:
            raise CommandError(f"{option} {text}: write NAME=VALUE")
    return [(text.partition("=")[0], text.partition("=")[2]) for text in texts]


def _secret(name: str, text: str) -> tuple[str, str]:
    secret, slash, key = text.partition("/")
    if not (secret and slash and key):
        raise CommandError(f"--secret-env {name}={text}: write {name}=SECRET/KEY")
    return secret, key


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise CommandError(
            "YAML needs the package PyYAML: pip install 'ringdance[k8s]' (or take --format json)"
        ) from None
    return yaml


def _print(documents: Sequence[Document], style: str) -> None:
    if style == "json":
        # One document as itself, several as the list that kubectl takes.
        single = (
            documents[0] if len(documents) == 1 else {"apiVersion": "v1", "kind": "List", "items": documents}
        )
        print(json.dumps(single, indent=2))
    else:
        yaml = _yaml()

        class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]  # PyYAML has no types
            """Without anchors, which people read badly."""

            def ignore_aliases(self, data: Any) -> bool:
                return True

        print(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=110), end="")


def _read(file: str) -> list[Document]:
    """The documents of a file of YAML or JSON."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = [json.loads(text)]
    except ValueError:
        yaml = _yaml()
        try:
            found = [document for document in yaml.safe_load_all(text) if document is not None]
        except yaml.YAMLError as error:
            raise CommandError(f"{file}: it is neither YAML nor JSON: {error}") from None
    flat: list[Document] = []
    for document in found:
        if not isinstance(document, dict) or "kind" not in document:
            raise CommandError(f"{file}: it holds something that is no object of Kubernetes")
        flat += document.get("items") or [] if document["kind"] == "List" else [document]
    if not flat:
        raise CommandError(f"{file}: it is empty")
    return flat


def _manifest(arguments: argparse.Namespace) -> int:
    _print(manifest(_request(arguments), arguments.kind), arguments.format)
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    if bool(arguments.file) == bool(arguments.image):
        raise CommandError("give either -f FILE, or --image IMAGE and a command")
    if arguments.file and arguments.command:
        raise CommandError("-f FILE: the command is in the file; change it there")
    kubectl = Kubectl(arguments.namespace, arguments.context)
    documents = _read(arguments.file) if arguments.file else manifest(_request(arguments), arguments.kind)
    print(submit(documents, kubectl), end="", flush=True)
    if arguments.follow:
        return logs(documents[-1]["metadata"]["name"], kubectl, follow=True, wait=arguments.wait)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    documents = []
    for document in _read(arguments.file):
        if document.get("kind") != "MPIJob":
            documents.append(document)
            continue
        name = (document.get("metadata") or {}).get("name", "MPIJob")
        try:
            new, notes = convert(document)
        except LaunchError as error:
            raise CommandError(f"{arguments.file}: {name}: {error}") from None
        documents.append(new)
        for note in notes:
            print(f"{name}: {note}", file=sys.stderr)
    _print(documents, arguments.format)
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    kubectl = Kubectl(arguments.namespace, arguments.context)
    return logs(arguments.name, kubectl, arguments.follow, arguments.workers, arguments.wait)


def _delete(arguments: argparse.Namespace) -> int:
    print(delete(arguments.name, Kubectl(arguments.namespace, arguments.context)), end="")
    return 0
