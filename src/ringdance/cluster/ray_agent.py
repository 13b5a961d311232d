"""In place of ssh: ``ray_agent.py HOST COMMAND...`` lets the head actor run the command on that host.

mpiexec starts it on the first node; its exit code is the command's.
"""

from __future__ import annotations

import os
import socket
import sys


def main(words: list[str]) -> int:
    """Hand the command over, wait for its end, and return its exit code."""
    from ringdance.cluster.ray_rank import receive, send

    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ["RAY_RINGDANCE_AGENT"])
    send(sock, (words[0], " ".join(words[1:])))
    try:
        return int(receive(sock))
    except EOFError:
        return 255


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose ray.py is not Ray
    sys.exit(main(sys.argv[1:]))
