"""What importing a part of the library brings along, seen in a new process.

The import rules between modules are in pyproject.toml (import-linter). These tests check what really happens,
including lazy imports and third parties.
"""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterable

import pytest
from sampled import sampled

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "mxnet", "sklearn"}
ENGINE = {"ringdance.training", "ringdance.training.session", "ringdance.core", "ringdance.core.transport"}
BINDINGS = {
    "ringdance.torch", "ringdance.numpy", "ringdance.tensorflow", "ringdance.jax", "ringdance.keras",
    "ringdance.mxnet",
}  # fmt: skip

PROBE = """
import json, os, signal, sys, threading, time
{first}
before = [signal.getsignal(n) for n in signal.valid_signals()], dict(os.environ), threading.active_count()
start = time.perf_counter()
import {names}
seconds = time.perf_counter() - start
after = [signal.getsignal(n) for n in signal.valid_signals()], dict(os.environ), threading.active_count()
print(json.dumps({{"modules": sorted(sys.modules), "seconds": seconds,
                  "same": [a == b for a, b in zip(before, after)]}}))
"""


def imported(module: str, whole: bool = True, frameworks: Iterable[str] = ()) -> set[str]:
    """Return the modules loaded after importing ``module``, with all its submodules if ``whole``.

    The import must not change signal handlers, environment variables or threads. Changes by ``frameworks``
    themselves do not count.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    names = [module]
    if whole:
        directories = spec.submodule_search_locations or []
        names += [submodule.name for submodule in pkgutil.walk_packages(directories, module + ".")]
    code = PROBE.format(first="".join(f"import {name}\n" for name in frameworks), names=", ".join(names))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    seen = json.loads(done.stdout)
    print(f"import {module}: {seen['seconds'] * 1000:.0f} ms, {len(seen['modules'])} modules")
    assert seen["same"] == [True, True, True], "signal handlers, environment or threads changed"
    return set(seen["modules"])


def parts_of(modules: set[str], names: set[str]) -> set[str]:
    return {m for m in modules if any(m == name or m.startswith(name + ".") for name in names)}


def test_the_package_alone_brings_nothing():
    modules = imported("ringdance", whole=False)
    assert parts_of(modules, {"ringdance"}) == {"ringdance"}
    assert not parts_of(modules, FRAMEWORKS | {"mpi4py", "numpy"})


@pytest.mark.parametrize(
    "module",
    [
        "ringdance.settings", "ringdance.errors", "ringdance.tools.cli", "ringdance.launch",
        "ringdance.tools.doctor", "ringdance.tools.hosts", "ringdance.submit",
    ],
)
def test_the_shell_s_side_knows_nothing_of_training(module):
    modules = imported(module)
    assert not parts_of(modules, FRAMEWORKS | ENGINE | BINDINGS | {"mpi4py", "numpy"})


@pytest.mark.parametrize(
    ("module", "above"),
    [
        ("ringdance.core.transport", {"ringdance.core.engine", "ringdance.training"}),
        ("ringdance.core", {"ringdance.training"}),
        ("ringdance.training.session", {"ringdance.training.collectives", "ringdance.training.gradients"}),
        ("ringdance.training", set()),
    ],
)
def test_a_layer_brings_only_layers_below(module, above):
    modules = imported(module)
    assert not parts_of(modules, FRAMEWORKS | BINDINGS | above | {"ringdance.launch", "ringdance.tools"})
    assert not parts_of(modules, {"mpi4py"}), "MPI is imported by init(), and only under a launcher"


@pytest.mark.parametrize("name", ["cli", "timeline"])
def test_what_a_run_has_left_is_read_without_the_launcher(name):
    modules = imported(f"ringdance.tools.report.{name}", whole=False)
    launcher = {m for m in modules if m.startswith("ringdance.launch.")}
    assert launcher == {"ringdance.launch.parser", "ringdance.launch.foreign"}


def test_data_brings_numpy_only():
    modules = imported("ringdance.data", whole=False)
    own = {"ringdance.launch", "ringdance.host.schedulers", "ringdance.tools"}
    others = own | {"mpi4py", "PIL", "simplejpeg", "rich"}
    assert not parts_of(modules, FRAMEWORKS | BINDINGS | ENGINE | others)


@pytest.mark.parametrize("name", sampled("bindings", ["numpy", "torch", "jax"], 1, ["numpy"]))
def test_a_binding_brings_its_framework_only(name):
    module, own = f"ringdance.{name}", {name} & FRAMEWORKS
    for framework in own:
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"needs {framework}")
    modules = imported(module, frameworks=own)
    assert not parts_of(modules, FRAMEWORKS - own)
    assert not parts_of(modules, {"ringdance.launch", "ringdance.tools", "mpi4py"})
    assert not parts_of(modules, {"torch._dynamo"}), "slow to import; only torch.compile needs it"
