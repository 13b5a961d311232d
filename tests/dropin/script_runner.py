"""Run several scripts one after the other in this process: `python script_runner.py PLAN.json`.

The plan is a list of tasks (`Task` in script_jobs.py). Next to a task's directory, this rank writes
DIRECTORY.RANK.out and .err, and .json with `code` and the time at which the run `ended`. Each script runs as
__main__ before init(), as if it were the only one, but processes start and frameworks are imported only once.
A task with its own text runs after init().
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from typing import Any

NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
RANK = next((os.environ[name] for name in NAMES if name in os.environ), "0")


def run(script: str, words: list[str], directory: str, text: str, alone: bool) -> int:
    """Run one script to its end and return what its exit code would be."""
    from ringdance.training import session

    environ = dict(os.environ)
    for descriptor, ending in ((1, "out"), (2, "err")):
        file = os.open(f"{directory}.{RANK}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(directory)
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(script)
    try:
        if text:
            session.init()
            exec(compile(text, script, "exec"), {"__name__": "__main__"})
        elif not alone or RANK == "0":
            runpy.run_path(script, run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        session.shutdown()
        if "tensorflow" in sys.modules:  # the next script must find an empty graph
            sys.modules["tensorflow"].compat.v1.reset_default_graph()
        os.environ.clear()
        os.environ.update(environ)
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    with open(sys.argv[1]) as file:
        plan: list[dict[str, Any]] = json.load(file)
    for task in plan:
        code = run(**task)
        with open(f"{task['directory']}.{RANK}.json", "w") as file:
            json.dump({"code": code, "ended": time.time()}, file)


if __name__ == "__main__":
    main()
