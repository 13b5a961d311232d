"""A rank in a job on Ray. It receives calls from the actor on its machine and executes them one at a time.

``python -m ringdance.submit.ray_rank`` listens on a socket in the job's directory. All messages are dicts.
The actor's first message has the keys "environ", "path" and "directory". Each later message has "kind" and
"call", a pickled function with its arguments. The answer, which is pickled, has either "value", or "error"
and "traceback". The rank exits when the connection closes.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from multiprocessing.connection import Listener
from typing import Any

from ringdance.host.agent.rank import DIRECTORY


def address(directory: str, rank: int | str) -> str:
    """Return the path of a rank's socket in the job's directory."""
    return os.path.join(directory, f"call.{rank}")


def main() -> None:
    """Serve calls until the actor closes the connection."""
    import cloudpickle

    with Listener(address(os.environ[DIRECTORY], os.environ["RINGDANCE_RANK"]), "AF_UNIX") as listener:
        connection = listener.accept()
    setup = connection.recv()
    os.environ.update(setup["environ"])
    sys.path[:] = setup["path"] + [entry for entry in sys.path if entry not in setup["path"]]
    if os.path.isdir(setup["directory"]):
        os.chdir(setup["directory"])
    instance: list[Any] = [None]
    while True:
        try:
            call = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = cloudpickle.dumps({"value": _do(call, instance)})
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            answer = pickle.dumps({"error": text, "traceback": traceback.format_exc()})
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(answer)


def _do(call: dict[str, Any], instance: list[Any]) -> Any:
    """Execute a call: create the instance, or call a function with or without the instance."""
    function, args, kwargs = pickle.loads(call["call"])
    if call["kind"] == "make":
        instance[0] = function(*args, **kwargs)
        return None
    return function(instance[0]) if call["kind"] == "execute" else function(*args, **kwargs)


if __name__ == "__main__":
    main()
