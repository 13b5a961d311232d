"""A search as a Katib Experiment, whose trials are MPIJobs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringdance.errors import LaunchError
from ringdance.launch.parser import Parser
from ringdance.search import REPORT
from ringdance.search.space import Parameter, Space, as_text, check_command, substitute
from ringdance.submit.kubernetes.job import Document, JobRequest
from ringdance.submit.kubernetes.manifest import manifest
from ringdance.submit.options import add_options, from_arguments

_ENDED = 'status.conditions.#(type=="%s")#|#(status=="True")#'
# What Katib has too, by our names: its own, and those of options.
_WHEN = {"n_startup_trials": "min_trials_required", "n_warmup_steps": "start_step"}
_SEED = {"seed": "random_state"}
_ALGORITHMS = {"tpe": ("tpe", _SEED), "random": ("random", _SEED), "median": ("medianstop", _WHEN)}


def experiment(space: Space, command: Sequence[str]) -> Document:
    """Write the Experiment (``kubeflow.org/v1beta1``) whose trials run `command`.

    Raises:
        LaunchError: Katib cannot do what the space asks for, or the job's options are wrong.
    """
    check_command(space, command)
    given = {name: f"${{trialParameters.{name}}}" for name in (*space.parameters, "trial")}
    try:
        command = substitute(command, given)
    except KeyError as error:
        raise LaunchError(f"--katib: trials share no directory: there is no {{{error.args[0]}}}") from None
    aim, options = space.objective, dict(space.kubernetes)
    name, pattern = _metric(space)
    parallel = options.pop("parallel", 2)
    request = _request(options, command)
    env = {one.env: given[name] for name, one in space.parameters.items() if one.env}
    env |= {} if aim.line else {REPORT: f"print:{name}"}
    document = manifest(replace(request, env={**request.env, **env}))[0]
    used = [one for one in given if given[one] in str(document)]
    strategy = "latest" if aim.take == "last" else aim.goal[:3]
    spec: Document = {
        "objective": {
            "type": aim.goal, "objectiveMetricName": name,
            "metricStrategies": [{"name": name, "value": strategy}],
        },
        "algorithm": _algorithm(space.sampler, "tpe", "random"),
        "maxTrialCount": space.trials, "parallelTrialCount": parallel, "maxFailedTrialCount": space.failures,
        "metricsCollectorSpec": {
            "collector": {"kind": "StdOut"}, "source": {"filter": {"metricsFormat": [pattern]}},
        },
        "parameters": [_parameter(name, one) for name, one in space.parameters.items()],
        "trialTemplate": {
            "primaryContainerName": "launcher",
            "primaryPodLabels": {"training.kubeflow.org/job-role": "launcher"},
            "successCondition": _ENDED % "Succeeded", "failureCondition": _ENDED % "Failed",
            "trialParameters": [
                {"name": one, "reference": "${trialSpec.Name}" if one == "trial" else one} for one in used
            ],
            "trialSpec": {key: document[key] for key in ("apiVersion", "kind", "spec")},
        },
    }  # fmt: skip
    if space.pruner["name"] != "none":
        spec["earlyStopping"] = _algorithm(space.pruner, "median")
    return {**document, "apiVersion": "kubeflow.org/v1beta1", "kind": "Experiment", "spec": spec}


def _request(options: Mapping[str, Any], command: Sequence[str]) -> JobRequest:
    """Read the options of ``ringdance k8s manifest`` that the file has."""
    parser = Parser(prog="kubernetes:", usage="options of `ringdance k8s manifest`", add_help=False)
    add_options(parser, JobRequest)
    several = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    words = [f"--{name}={value}" for name, values in several.items() for value in values]
    request = from_arguments(JobRequest, parser.parse_args([*words, "--", *command]))
    if request.kind != "MPIJob":
        raise LaunchError("--katib: trials are MPIJobs; leave `kind:` out")
    return request


def _metric(space: Space) -> tuple[str, str]:
    """Return the metric's name, and Katib's pattern with a group for the name and one for the value."""
    aim = space.objective
    if aim.file:
        raise LaunchError("--katib: Katib reads the launcher's output only; use `line:` or ringdance.report")
    if not aim.line:
        return aim.name, f"({re.escape(aim.name)})=(\\S+)"
    text, _, rest = aim.line.partition("(")
    if not re.fullmatch(r"[\w ,:=/-]*\w[\w ,:=/-]*", text) or rest.startswith("?") or "(" in rest:
        wrong = f"--katib: the line {aim.line!r} must be plain text, which is the metric's name for Katib"
        raise LaunchError(f"{wrong}, and one group for the value, such as 'accuracy: (\\S+)'")
    return text.strip(), f"({text.strip()})\\s*({rest}"


def _algorithm(options: Mapping[str, Any], *names: str) -> Document:
    more = {key: value for key, value in options.items() if key != "name"}
    name, settings = _ALGORITHMS[options["name"] if options["name"] in names else names[0]]
    if options["name"] not in names or not more.keys() <= settings.keys():
        known = f"{' and '.join(names)}, with {' and '.join(settings)}"
        raise LaunchError(f"--katib: {dict(options)}: what Katib has too is {known}")
    chosen = [{"name": settings[key], "value": as_text(value)} for key, value in more.items()]
    return {"algorithmName": name, **({"algorithmSettings": chosen} if chosen else {})}


def _parameter(name: str, one: Parameter) -> Document:
    names = {"low": "min", "high": "max", "step": "step"}
    space: Document = {names[key]: as_text(value) for key, value in one.options.items() if key in names}
    if one.options.get("log"):
        space["distribution"] = "logUniform"
    if choices := one.options.get("choices"):
        space["list"] = [as_text(value) for value in choices]
    kind = "double" if one.kind == "float" else one.kind
    return {"name": name, "parameterType": kind, "feasibleSpace": space}
