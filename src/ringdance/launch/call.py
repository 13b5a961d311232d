"""Run the function passed to ``ringdance.run`` on a rank: ``python -m ringdance.launch.call``.

``call.pkl`` in the job's directory on this host contains the caller's ``sys.path`` and the function with its
arguments. The result is written to ``result.<rank>.pkl``. An exception ends the interpreter as in any script.
"""

from __future__ import annotations

import os
import pickle
import sys

from ringdance.host.agent.rank import DIRECTORY


def main() -> None:
    """Load the call from the job's directory, run it, and store its result there."""
    import cloudpickle

    directory = os.environ[DIRECTORY]
    with open(os.path.join(directory, "call.pkl"), "rb") as file:
        path, call = pickle.load(file)
    # A function from an importable module is pickled by name, so this rank must be able to import whatever
    # the caller can.
    sys.path[:] = path + [entry for entry in sys.path if entry not in path]
    function, args, kwargs = pickle.loads(call)
    result = function(*args, **kwargs)
    target = os.path.join(directory, f"result.{os.environ['RINGDANCE_RANK']}.pkl")
    with open(target + ".part", "wb") as file:
        cloudpickle.dump(result, file)
    os.rename(target + ".part", target)


if __name__ == "__main__":
    main()
