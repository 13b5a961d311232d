"""A search as a Katib Experiment, whose trials are MPIJobs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ringdance.errors import LaunchError
from ringdance.search import REPORT
from ringdance.search.space import Objective, Parameter, Space, as_text, check_command, names_in, substitute
from ringdance.submit.kubernetes.job import Document, JobRequest, literal
from ringdance.submit.kubernetes.manifest import manifest

_ENDED = 'status.conditions.#(type=="%s")#|#(status=="True")#'
# What Katib has too, by our names: its own, and those of options.
_SAMPLERS = {"tpe": "tpe", "random": "random"}, {"seed": "random_state"}
_PRUNERS = (
    {"median": "medianstop"},
    {"n_startup_trials": "min_trials_required", "n_warmup_steps": "start_step"},
)


def experiment(space: Space, job: JobRequest, parallel: int) -> Document:
    """Write the Experiment (``kubeflow.org/v1beta1``) whose trials are such jobs, some at a time.

    Raises:
        LaunchError: Katib cannot do what the space asks for, or the job's options are wrong.
    """
    check_command(space, job.command)
    given = {name: f"${{trialParameters.{name}}}" for name in (*space.parameters, "trial")}
    if lost := names_in(job.command) & {"dir", "params", "slots"}:
        raise LaunchError(f"--katib: trials share no directory: there is no {{{lost.pop()}}}")
    if job.kind != "MPIJob":
        raise LaunchError("--katib: trials are MPIJobs; leave --kind out")
    aim, (metric, pattern) = space.objective, _metric(space.objective)
    env = job.env if aim.line else {**job.env, REPORT: f"print:{metric}"}
    document = manifest(replace(job, command=substitute(job.command, given), env=env))[0]
    strategy = "latest" if aim.take == "last" else aim.goal[:3]
    spec: Document = {
        "objective": {
            "type": aim.goal, "objectiveMetricName": metric,
            "metricStrategies": [{"name": metric, "value": strategy}],
        },
        "algorithm": _algorithm(space.sampler, *_SAMPLERS),
        "maxTrialCount": space.trials, "parallelTrialCount": parallel, "maxFailedTrialCount": space.failures,
        "metricsCollectorSpec": {
            "collector": {"kind": "StdOut"}, "source": {"filter": {"metricsFormat": [pattern]}},
        },
        "parameters": [_parameter(name, one) for name, one in space.parameters.items()],
        "trialTemplate": {
            "primaryContainerName": "launcher",
            "primaryPodLabels": {"training.kubeflow.org/job-role": "launcher"},
            "successCondition": _ENDED % "Succeeded", "failureCondition": _ENDED % "Failed",
            "trialParameters": [  # Katib refuses those that are not in the trial
                {"name": name, "reference": "${trialSpec.Name}" if name == "trial" else name}
                for name, text in given.items() if text in str(document)
            ],
            "trialSpec": {key: document[key] for key in ("apiVersion", "kind", "spec")},
        },
    }  # fmt: skip
    if space.pruner["name"] != "nop":
        spec["earlyStopping"] = _algorithm(space.pruner, *_PRUNERS)
    return {**document, "apiVersion": "kubeflow.org/v1beta1", "kind": "Experiment", "spec": spec}


def _metric(aim: Objective) -> tuple[str, str]:
    """Return the metric's name, and Katib's pattern with a group for the name and one for the value."""
    if aim.file:
        raise LaunchError("--katib: Katib reads the launcher's output only; use `line:` or ringdance.report")
    if not aim.line:
        return aim.name, f"({re.escape(aim.name)})=(\\S+)"
    found = re.fullmatch(r"([\w ,:=/-]*\w[\w ,:=/-]*)(\((?!\?)[^(]*)", aim.line)
    if not found:
        wrong = f"--katib: the line {aim.line!r} must be plain text, which is the metric's name for Katib"
        raise LaunchError(f"{wrong}, and one group for the value, such as 'accuracy: (\\S+)'")
    text = found[1].strip()
    name = text.rstrip(" ,:=/-")
    return name, f"({name}){text.removeprefix(name)}\\s*{found[2]}"


def _algorithm(options: Mapping[str, Any], names: Any, settings: Any) -> Document:
    chosen = {key: value for key, value in options.items() if key != "name"}
    if options["name"] not in names or not chosen.keys() <= settings.keys():
        known = f"{' and '.join(names)}, with {' and '.join(settings)}"
        raise LaunchError(f"--katib: {dict(options)}: what Katib has too is {known}")
    more = [{"name": settings[key], "value": as_text(value)} for key, value in chosen.items()]
    return {"algorithmName": names[options["name"]], "algorithmSettings": more}


def _parameter(name: str, one: Parameter) -> Document:
    names = {"low": "min", "high": "max", "step": "step"}
    space: Document = {names[key]: as_text(value) for key, value in one.options.items() if key in names}
    if one.options.get("log"):
        space["distribution"] = "logUniform"
    if one.kind == "categorical":
        space["list"] = [literal(as_text(value)) for value in one.options["choices"]]
    kind = "double" if one.kind == "float" else one.kind
    return {"name": name, "parameterType": kind, "feasibleSpace": space}
