"""The command line of ``ringdance sagemaker``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ringdance.errors import ArgumentError
from ringdance.launch.environment import shown, shown_text
from ringdance.launch.parser import Parser
from ringdance.launch.spec import CommandError, as_program, parse_exports
from ringdance.submit.sagemaker import Estimator
from ringdance.submit.sagemaker.request import Input

_EPILOG = """\
examples:
  ringdance sagemaker submit --role arn:aws:iam::123456789012:role/Training --image IMAGE \\
      --instance-type ml.p3.16xlarge --instance-count 2 --processes-per-host 8 \\
      --source-dir src --input train=s3://bucket/train train.py --epochs 90
  ringdance sagemaker submit --dry-run ...            print the request, send nothing
  ringdance sagemaker submit --instance-type local --processes-per-host 2 train.py --epochs 1

What follows the script are its arguments: they travel as hyperparameters, so they have the form --name value.
"""


def main(argv: Sequence[str]) -> int:
    """``ringdance sagemaker``: `argv` without the program and ``sagemaker``; returns the exit code."""
    return as_program("ringdance sagemaker", lambda: _main(_parser().parse_args(list(argv))))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="ringdance sagemaker", description="Training on Amazon SageMaker.")
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")
    submit = commands.add_parser(
        "submit",
        help="start a training job",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(*names: str, **details: Any) -> None:
        submit.add_argument(*names, **details)

    add("--role", default="", help="ARN of the role that the job has")
    add("--image", default="", metavar="URI", help="container image, with sagemaker-training and an MPI")
    add("--instance-type", required=True, help="such as ml.p3.16xlarge; local for this machine")
    add("--instance-count", type=int, default=1, metavar="N", help="machines (default 1)")
    add("--processes-per-host", type=int, default=1, metavar="N", help="ranks on each (default 1)")
    add("--mpi-options", default="", metavar="TEXT", help="more options of mpirun, as one word")
    add("--source-dir", metavar="DIR", help="folder that is sent along (default: the script alone)")
    add("--input", action="append", default=[], metavar="NAME=S3URI", help="a channel of data")
    add("--input-mode", choices=("File", "Pipe", "FastFile"), default="File", help="default: File")
    add("--sharded", action="store_true", help="each host gets a part of the objects instead of all")
    add("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="variable of the containers")
    add("--name", help="of the job (default: the script's name and the time)")
    add("--region", help="default: AWS_REGION, or boto3's configuration")
    add("--output", metavar="S3URI", help="where model and output go")
    add("--volume-size", type=int, default=30, metavar="GB", help="default: 30")
    add("--max-run", type=int, default=86400, metavar="S", help="seconds it may run (default: a day)")
    add("--spot", action="store_true", help="on spot instances; needs --max-wait")
    add("--max-wait", type=int, metavar="S", help="seconds it may wait and run")
    add("--checkpoint", metavar="S3URI", help="where /opt/ml/checkpoints is kept")
    add("--metric", action="append", default=[], metavar="NAME=REGEX", help="a metric to find in the output")
    add("--timeline", action="store_true", help="write a timeline into the job's output")
    add("--autotune-log", action="store_true", help="write the tuner's log into the job's output")
    add("--no-wait", action="store_true", help="do not wait for the end")
    add("--quiet", action="store_true", help="do not show what the job prints")
    add("--dry-run", action="store_true", help="print the request as JSON, and send nothing")
    add("script", metavar="SCRIPT", help="within --source-dir, if that is given")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="of the script")
    return parser


def _main(arguments: argparse.Namespace) -> int:
    warnings.showwarning = lambda message, *_, **__: print(f"ringdance sagemaker: {message}", file=sys.stderr)
    mode = "ShardedByS3Key" if arguments.sharded else "FullyReplicated"
    inputs = {name: Input(uri, mode) for name, uri in _pairs("--input", arguments.input)}
    more = {
        "output_path": arguments.output,
        "max_wait": arguments.max_wait,
        "checkpoint_s3_uri": arguments.checkpoint,
        "environment": parse_exports(arguments.env, os.environ) or None,
        "metric_definitions": [
            {"Name": name, "Regex": regex} for name, regex in _pairs("--metric", arguments.metric)
        ],
    }
    mpi = {"enabled": True, "processes_per_host": arguments.processes_per_host}
    try:
        estimator = Estimator(
            arguments.script,
            arguments.source_dir,
            arguments.role,
            arguments.instance_type,
            arguments.instance_count,
            hyperparameters=hyperparameters(arguments.arguments),
            distribution={"mpi": {**mpi, "custom_mpi_options": arguments.mpi_options}},
            image_uri=arguments.image,
            region=arguments.region,
            timeline=arguments.timeline,
            autotune_log=arguments.autotune_log,
            input_mode=arguments.input_mode,
            use_spot_instances=arguments.spot,
            max_run=arguments.max_run,
            volume_size=arguments.volume_size,
            **{name: value for name, value in more.items() if value},
        )
        if arguments.dry_run:
            request = estimator.request(inputs, arguments.name)
            if "Environment" in request:
                request["Environment"] = {n: shown(n, value) for n, value in request["Environment"].items()}
            print(shown_text(json.dumps(request, indent=2)))
        else:
            estimator.fit(inputs, not arguments.no_wait, not arguments.quiet, arguments.name)
    except ArgumentError as error:
        raise CommandError(str(error)) from None
    return 0


def _pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    for text in texts:
        if not text.partition("=")[0] or not text.partition("=")[2]:
            raise CommandError(f"{option} {text}: write NAME=VALUE")
    return [(text.partition("=")[0], text.partition("=")[2]) for text in texts]


def hyperparameters(words: Sequence[str]) -> dict[str, Any]:
    """A script's arguments as hyperparameters; numbers, true and false stay such.

    Raises:
        CommandError: an argument without a name or without a value, which cannot travel.
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise CommandError(f"{word!r}: SageMaker passes a script its arguments as --name value only")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise CommandError(f"{word}: it has no value, which SageMaker needs: write {word} true")
            value = rest.pop(0)
        try:
            found[name[2:]] = json.loads(value)
        except ValueError:
            found[name[2:]] = value
    return found
