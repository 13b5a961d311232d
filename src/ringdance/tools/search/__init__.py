"""What ``ringdance search`` is made of, and the function by which a trial reports to it.

Importing this package needs the standard library only: scripts that train import it for :func:`report`.
"""

from __future__ import annotations

import json
import os

from ringdance.settings.names import RANK_NAMES

REPORT = "RINGDANCE_SEARCH_REPORT"
"""Variable with the file that a trial reports to."""
STOP = ".stop"
"""Suffix of the file, beside that of the reports, by which a trial is asked to end."""


def report(value: float, step: int | None = None) -> None:
    """Report the objective's `value` to ``ringdance search``; does nothing outside of it.

    Only rank 0's counts: others return at once. Call it at the end for a result, or after each epoch, so that
    the search can end trials that will not be among the best.

    Args:
        value: of the objective, as a number or what ``float()`` accepts, such as a tensor of one element.
        step: of the training, from 0; default: the number of earlier reports.

    Raises:
        SystemExit: the search has decided that this trial is not worth its time; it ends all ranks.
        FileNotFoundError: the study's directory is not on this host.
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
        text = f"{os.path.dirname(target)} is not on {os.uname().nodename}, where this rank runs: give "
        raise FileNotFoundError(f"{text}`ringdance search` a --study that all hosts share") from None
    if os.path.exists(target + STOP):
        raise SystemExit("ringdance search: this trial is pruned")
