"""What runs inside local mode's stand-in for a container: the toolkit, and with arguments its ``mpirun``."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence


def train() -> None:
    """Run SageMaker's toolkit as its command ``train`` does; does not return."""
    from sagemaker_training import mpi, trainer

    # One host: nobody comes by ssh, and no other host waits to be told of the end.
    mpi._start_sshd_daemon = lambda: None
    mpi.time = types.SimpleNamespace(sleep=lambda seconds: None)
    trainer.train()


def mpirun(words: Sequence[str]) -> int:
    """The toolkit's mpirun, by this package's launcher; the exit code."""
    from ringdance.launch.mpi import mpirun_cli

    # What it loads first into each rank tells a host's name from files of /opt/ml, which are not there.
    at = next((n for n, word in enumerate(words) if word.startswith("LD_PRELOAD=")), 0)
    return mpirun_cli.main([*words[: at - 1], *words[at + 1 :]] if at else words)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(mpirun(sys.argv[1:]))
    train()
