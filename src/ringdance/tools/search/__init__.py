"""Hyperparameter search with ``ringdance search``, and ``report()``, which a trial calls to report values.

This package does not import third-party libraries, because training scripts import ``report`` from it.
"""

from __future__ import annotations

import json
import os

from ringdance.settings.names import RANK_NAMES

REPORT = "RINGDANCE_SEARCH_REPORT"
"""Environment variable that contains the path of the file to which a trial writes its reports."""
STOP = ".stop"
"""Suffix that turns the path of the report file into the path of the file that tells a trial to end."""


def report(value: float, step: int | None = None) -> None:
    """Report the objective's value to ``ringdance search``. Does nothing outside a search.

    Only rank 0 reports a value. On other ranks, the call has no effect. Call this function once at the end of
    training, or after each epoch, so that the search can prune unpromising trials.

    Args:
        value: Objective value: a number or anything ``float()`` accepts, such as a one-element tensor.
        step: Training step, starting at 0. Default: the number of earlier reports.

    Raises:
        SystemExit: The search has pruned this trial. Unless caught, the exception ends all ranks.
        FileNotFoundError: The study's directory does not exist on this host.
    """
    target = os.environ.get(REPORT, "")
    ranks = (os.environ.get(name) for name in ("RINGDANCE_RANK", *RANK_NAMES))
    if not target or next(filter(None, ranks), "0") != "0":
        return
    line = json.dumps({"value": float(value), "step": None if step is None else int(step)})
    try:
        with open(target, "a") as file:
            file.write(line + "\n")
    except FileNotFoundError:
        text = f"{os.path.dirname(target)} is missing on {os.uname().nodename}, where this rank runs. Run "
        raise FileNotFoundError(f"{text}`ringdance search` with a --study that all hosts share") from None
    if os.path.exists(target + STOP):
        raise SystemExit("ringdance search: this trial has been pruned")
