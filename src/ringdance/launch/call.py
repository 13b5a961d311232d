"""Execute a call in a rank of ``ringdance.run``: ``python -m ringdance.launch.call``.

The job's directory on this host holds ``call.pkl``: the caller's ``sys.path``, and the function with its
arguments. The result goes to ``result.<rank>.pkl``. An exception ends the interpreter as in any script.
"""

from __future__ import annotations

import os
import pickle
import sys

from ringdance.host.agent.rank import DIRECTORY


def main() -> None:
    """Run the call in the job's directory and store its result there."""
    import cloudpickle

    directory = os.environ[DIRECTORY]
    with open(os.path.join(directory, "call.pkl"), "rb") as file:
        path, call = pickle.load(file)
    # A function from an importable module is sent by name, so this rank must find what the caller can import.
    sys.path[:] = path + [entry for entry in sys.path if entry not in path]
    function, args, kwargs = pickle.loads(call)
    result = function(*args, **kwargs)
    target = os.path.join(directory, f"result.{os.environ['RINGDANCE_RANK']}.pkl")
    with open(target + ".part", "wb") as file:
        cloudpickle.dump(result, file)
    os.rename(target + ".part", target)


if __name__ == "__main__":
    main()
