"""An agent's facts about its machine. Agents start without the package and without ``site``."""

from __future__ import annotations

import json
import subprocess
import sys

from ringdance.host.agent.paths import package_directory
from ringdance.host.limits import usable_cores


def test_an_agent_counts_cores_as_all_others_do() -> None:
    code = "import json, sys; sys.path.append(sys.argv[1]); from host.system.machine import facts; "
    line = [sys.executable, "-I", "-S", "-c", code + "print(json.dumps(facts()))", package_directory()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert json.loads(done.stdout)["cores"] == usable_cores()
