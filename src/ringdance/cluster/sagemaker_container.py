"""What runs inside local mode's stand-in for a container: the toolkit, and with arguments its ``mpirun``."""

from __future__ import annotations

import os
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
    from ringdance.cluster.sagemaker_local import launcher_line
    from ringdance.launch import cli

    line, variables = launcher_line(words)
    os.environ.update(variables)
    return cli.main(line)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(mpirun(sys.argv[1:]))
    train()
