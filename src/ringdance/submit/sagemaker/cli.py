"""The command line of ``ringdance sagemaker``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch import subcommands
from ringdance.launch.remote.environment import is_secret, shown, shown_text
from ringdance.launch.spec import parse_exports
from ringdance.submit.options import add_options, from_arguments, pairs
from ringdance.submit.sagemaker.estimator import KEPT_IN_CLEAR, Estimator
from ringdance.submit.sagemaker.request import Input

_EPILOG = """\
examples:
  ringdance sagemaker submit --role arn:aws:iam::123456789012:role/Training --image IMAGE \\
      --instance-type ml.p3.16xlarge --instance-count 2 \\
      --source-dir src --input train=s3://bucket/train train.py --epochs 90
  ringdance sagemaker submit ... --processes-per-host 4 \\
      --input train=s3://bucket/clicks/,distribution=s3shardbykey,input_mode=FastFile train.py
  ringdance sagemaker submit --dry-run ...            print the request, send nothing

The words after the script are its arguments. They are sent as hyperparameters and must therefore have the
form --name value.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance sagemaker`` with the arguments ``argv``. Returns the exit code."""
    submit = subcommands.Subcommand(_submit, "start a training job", _add_arguments, _EPILOG)
    return subcommands.run("ringdance sagemaker", "Train on Amazon SageMaker.", {"submit": submit}, argv)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_options(parser, Estimator)
    text = "data channel, with options such as distribution=s3shardbykey, input_mode=Pipe, shuffle_seed=1"
    add("--input", action="append", default=[], metavar="NAME=S3URI[,...]", help=text)
    add("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="environment variable")
    text = "-x variable or script argument that is not a secret, although its name suggests that it is"
    add("--plain", action="append", default=[], metavar="NAME", help=text)
    add("--metric", action="append", default=[], metavar="NAME=REGEX", help="metric to find in the output")
    add("--name", help="name of the job (default: the script's name and the time)")
    add("--no-wait", action="store_true", help="do not wait for the job to end")
    add("--dry-run", action="store_true", help="print the request as JSON and send nothing")
    add("script", metavar="SCRIPT", help="training script, relative to --source-dir if that is set")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the script")


def _submit(arguments: argparse.Namespace) -> int:
    warnings.showwarning = lambda message, *_, **__: print(f"ringdance sagemaker: {message}", file=sys.stderr)
    metrics = [{"Name": name, "Regex": regex} for name, regex in pairs("--metric", arguments.metric).items()]
    environment = parse_exports(arguments.env, os.environ)
    parameters = hyperparameters(arguments.arguments)
    for name, value in (*environment.items(), *parameters.items()):
        if is_secret(name, str(value)) and name not in arguments.plain:
            raise LaunchError(f"{name} {KEPT_IN_CLEAR}. If it is not a secret, pass --plain {name}.")
    inputs = {name: Input.parse(text) for name, text in pairs("--input", arguments.input).items()}
    estimator = from_arguments(
        Estimator, arguments, entry_point=arguments.script, hyperparameters=parameters,
        environment=environment, metric_definitions=metrics,
    )
    if arguments.dry_run:
        request = estimator.request(inputs, arguments.name)
        for part in {"Environment", "HyperParameters"} & request.keys():
            request[part] = {name: shown(name, shown_text(text)) for name, text in request[part].items()}
        print(f"ringdance sagemaker: {estimator.started}", file=sys.stderr)
        print(json.dumps(request, indent=2))
    else:
        estimator.fit(inputs, not arguments.no_wait, job_name=arguments.name)
    return 0


def hyperparameters(words: Sequence[str]) -> dict[str, Any]:
    """Parse a script's arguments as hyperparameters. Values that are valid JSON are decoded.

    Raises:
        LaunchError: An argument has no name or no value, so SageMaker cannot pass it to the script.
    """
    parameters: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise LaunchError(f"{word!r}: SageMaker passes script arguments only in the form --name value")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise LaunchError(f"{word} has no value, but SageMaker requires one. Write {word} true.")
            value = rest.pop(0)
        try:
            parameters[name[2:]] = json.loads(value)
        except ValueError:
            parameters[name[2:]] = value
    return parameters
