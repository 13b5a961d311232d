"""Run SageMaker's toolkit in local mode's stand-in for a container, or with arguments its ``mpirun``."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence


def train() -> None:
    """Run SageMaker's toolkit as its command ``train`` does; does not return."""
    from sagemaker_training import mpi, trainer

    # There is one host: no ssh server is needed, and no other host waits for the end.
    mpi._start_sshd_daemon = lambda: None
    mpi.time = types.SimpleNamespace(sleep=lambda seconds: None)
    trainer.train()


def mpirun(words: Sequence[str]) -> int:
    """Run the toolkit's mpirun with this package's launcher; returns the exit code."""
    from ringdance.launch import mpirun_cli

    # The library that it preloads into each rank reads the host's name from files of /opt/ml, missing here.
    at = next((n for n, word in enumerate(words) if word.startswith("LD_PRELOAD=")), 0)
    return mpirun_cli.main([*words[: at - 1], *words[at + 1 :]] if at else words)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(mpirun(sys.argv[1:]))
    train()
