"""Search hyperparameters with ``ringdance search``, and report values to it from a trial.

Importing this package only needs the standard library, because training scripts import it for ``report``.
"""

from __future__ import annotations

import json
import os

from ringdance.settings.names import RANK_NAMES

REPORT = "RINGDANCE_SEARCH_REPORT"
"""Variable with the path of the file to which a trial reports."""
STOP = ".stop"
"""Suffix of the file, next to the reports, that asks a trial to end."""


def report(value: float, step: int | None = None) -> None:
    """Report the objective's value to ``ringdance search``. Outside of a search, this does nothing.

    Only rank 0 reports; other ranks return at once. Call it at the end for a result, or after each epoch so
    that the search can end trials that will not be among the best.

    Args:
        value: Objective value: a number or anything ``float()`` accepts, such as a one-element tensor.
        step: Training step, from 0. Default: the number of earlier reports.

    Raises:
        SystemExit: The search has pruned this trial. If uncaught, this ends all ranks.
        FileNotFoundError: The study's directory is not on this host.
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
        text = f"{os.path.dirname(target)} is not on {os.uname().nodename}, where this rank runs. Pass "
        raise FileNotFoundError(f"{text}`ringdance search` a --study that all hosts share") from None
    if os.path.exists(target + STOP):
        raise SystemExit("ringdance search: this trial is pruned")
