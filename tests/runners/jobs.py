"""The jobs of tests/runners/run.py: their tests, ranks, and which of them only `make test-all` runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PARTS = ("lint", "unit", "ranks", "dropin", "faults", "hosts")


@dataclass(frozen=True)
class Job:
    """One process tree of tests.

    Attributes:
        part: One of PARTS.
        name: Unique within its part.
        paths: Files and directories for pytest, relative to tests/. Glob patterns are expanded.
        ranks: Number of ranks that mpiexec starts, or 0 for a plain pytest.
        workers: Number of pytest-xdist workers of a plain pytest.
        command: Tool to run instead of pytest.
        environ: Additional environment variables.
        fast_environ: Environment variables to add unless slow tests run too.
        options: Additional pytest options.
        alone: If True, no other job runs at the same time.
        only_slow: If True, the job runs only with --slow. Another number of ranks, or another MPI, does not
            need whole sweeps: such a job of ranks runs only the day's cases, as in make test.
        whole: If True, an ``only_slow`` job runs all its tests anyway.
        needs: Packages without which the job has nothing to run.
        venv: Directory in this repository with the environment to use. If empty, this Python runs the job.
    """

    part: str
    name: str
    paths: tuple[str, ...] = ()
    ranks: int = 0
    workers: int = 0
    command: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    fast_environ: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    alone: bool = False
    only_slow: bool = False
    whole: bool = False
    needs: tuple[str, ...] = ()
    venv: str = ""

    def __str__(self) -> str:
        return f"{self.part}/{self.name}"

    @property
    def runs_share(self) -> bool:
        """True if the job skips slow tests even when other jobs run them."""
        return self.only_slow and self.ranks > 0 and not self.whole

    def python(self) -> Path:
        """Return the interpreter that runs the job."""
        return TESTS.parent / self.venv / "bin" / "python" if self.venv else Path(sys.executable)

    def files(self) -> list[str]:
        """Return the existing paths that match the patterns."""
        return [str(path) for pattern in self.paths for path in sorted(TESTS.glob(pattern))]


def all_jobs() -> list[Job]:
    """List the jobs in the order in which they start."""
    quiet = ("-rfE",)  # the contract's GPU variants are skipped: too many to list
    keras = ("-rfE", "-W", "ignore::DeprecationWarning")  # Keras itself emits a thousand warnings
    numpy = (
        "ranks/test_collectives_*.py", "ranks/test_numpy_*.py", "ranks/test_re*.py", "ranks/test_random_*.py"
    )  # fmt: skip
    torch = ("ranks/test_torch_*.py", "ranks/test_compat_*.py", "ranks/test_documented_*.py")
    hosts = {
        "harm": ("hosts/test_[fkgp]*.py",),
        "jobs": ("hosts/test_[!fkgp]*.py",),
    }
    # Tests compile programs and run them once. Without optimization, that takes XLA a third less time.
    xla = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}
    jax = {"needs": ("jax", "optax"), "fast_environ": xla}
    jobs = [
        Job("lint", "mypy", command=("mypy",)),
        Job("unit", "tools", (
            "unit/data", "unit/host", "unit/launch", "unit/submit", "unit/tools",
        )),
        Job("dropin", "scripts", (
            "dropin/test_scripts*.py", "dropin/test_docs.py", "dropin/test_autotune.py",
        )),
        Job("dropin", "commands", (
            "dropin/test_docs_commands.py", "dropin/test_torch_tools.py", "dropin/test_bench_*.py",
            "dropin/test_compare.py",
        )),
        Job("unit", "engine", (
            "unit/core", "unit/training", "unit/torch", "unit/tensorflow", "unit/compat",
        )),
        Job("unit", "project", ("unit/test_*.py",)),
        Job("dropin", "launching", (
            "dropin/test_horovodrun.py", "dropin/test_stall.py", "dropin/test_ray.py",
            "dropin/test_torch_backend.py", "dropin/test_dist.py",
            "dropin/test_sagemaker_*.py", "dropin/test_data_service.py",
        )),
        Job("lint", "ruff", command=("ruff", "check")),
        Job("lint", "imports", command=("lint-imports",)),
        Job("lint", "words", command=("codespell",)),
        Job("lint", "phrases", command=("python", str(TESTS / "runners" / "phrases.py"))),
    ]
    jobs += [Job("ranks", f"numpy-{size}", numpy, size) for size in (1, 2, 3, 4)]
    for size in (1, 2, 3):  # only the engine treats four ranks differently from three
        jobs += [
            # Keras tests share the jobs of two frameworks, whose import costs seconds of CPU time per rank.
            Job("ranks", f"torch-{size}", (*torch, "ranks/keras") if size > 1 else torch, size,
                only_slow=size != 2, options=keras, environ={"KERAS_BACKEND": "torch"},
                needs=("torch", "keras")),
            Job("ranks", f"tensorflow-{size}", ("ranks/test_tensorflow_*.py", "ranks/keras")[:size], size,
                only_slow=size != 2, options=keras, environ={"KERAS_BACKEND": "tensorflow"},
                needs=("tensorflow", "keras")),
            Job("ranks", f"jax-{size}", ("ranks/test_jax_*.py",), size, only_slow=size != 2, **jax),
        ]  # fmt: skip
    by_gloo = tuple(f"ranks/test_torch_{name}.py" for name in (
        "collectives", "gradients", "optimizer", "passes", "training", "sharding", "state", "embedding",
    ))  # fmt: skip
    jobs += [
        Job("ranks", f"torch-gloo-{size}", by_gloo, size, only_slow=True, needs=("torch",),
            environ={"RINGDANCE_CPU_OPERATIONS": "gloo"}) for size in (2, 3)
    ]  # fmt: skip
    jobs += [
        Job("ranks", "keras-jax-nccl-2", ("ranks/keras",), 2, only_slow=True, options=keras,
            environ={"KERAS_BACKEND": "jax", "TEST_NCCL": "double"}, needs=("keras", "jax"), fast_environ=xla)
    ]  # fmt: skip
    vision = {"only_slow": True, "whole": True, "venv": ".venv-torchvision"}
    jobs += [Job("ranks", "torchvision-2", ("ranks/torchvision",), 2, **vision)]
    by_nccl = tuple(f"ranks/test_jax_{name}.py" for name in (
        "collectives", "nccl", "order", "flax", "random", "training", "transforms",
    ))  # fmt: skip
    for size in (2, 3):
        later = size == 3
        jobs += [
            Job("ranks", f"jax-devices-{size}", ("ranks/jax_devices",), size, only_slow=later, whole=True,
                **jax),
            Job("ranks", f"keras-jax-{size}", ("ranks/keras",), size, only_slow=later, options=keras,
                environ={"KERAS_BACKEND": "jax"}, needs=("keras", "jax"), fast_environ=xla),
            # The path of a GPU, on host memory.
            Job("ranks", f"jax-nccl-{size}", by_nccl if later else by_nccl[:3], size, only_slow=later,
                environ={"TEST_NCCL": "double"}, **jax),
        ]  # fmt: skip
        jobs += [
            # With Horovod's TensorFlow contract, because importing TensorFlow takes seconds per rank.
            Job("dropin", f"tensorflow-{size}",
                ("ranks/keras2", "ranks/keras/test_keras_random.py", "dropin/contract/test_tensorflow_*.py"),
                size, only_slow=later, options=keras, environ={"TF_USE_LEGACY_KERAS": "1"},
                needs=("tensorflow", "tf_keras")),
            Job("dropin", f"torch-{size}", ("dropin/contract/test_torch_*.py",), size, options=quiet,
                needs=("torch",), only_slow=not later),
        ]  # fmt: skip
    mxnet = {"options": keras, "venv": ".venv-mxnet"}
    by_mxnet = ("dropin/contract/test_mxnet_*.py",)
    jobs += [
        Job("dropin", f"mxnet-{size}", by_mxnet, size, only_slow=size != 2, **mxnet) for size in (1, 2, 3)
    ]
    jobs += [Job("dropin", "mxnet", ("dropin/test_mxnet_*.py",), only_slow=True, **mxnet)]
    for name in ("mpich", "impi"):
        jobs += [
            Job("ranks", f"numpy-{size}-{name}", numpy, size, only_slow=(size, name) != (2, "mpich"),
                venv=f".venv-{name}")
            for size in (1, 2, 3, 4)
        ]  # fmt: skip
    jobs += [
        Job("faults", "faults", ("faults",), workers=4, alone=True),
        Job("faults", "browser", ("browser",), alone=True, needs=("playwright",)),
        *(Job("hosts", name, paths) for name, paths in hosts.items()),
    ]
    for name in ("mpich", "impi"):
        other = {"only_slow": True, "alone": True, "venv": f".venv-{name}"}
        jobs += [
            Job("faults", f"faults-{name}", ("faults",), workers=4, options=("-m", "not slow"), **other),
            Job("hosts", f"hosts-{name}", ("hosts",), environ={"KILL_TRIALS": "1"}, **other),
        ]
    sagemaker = ("hosts/test_sagemaker.py",)
    return [*jobs, Job("hosts", "sagemaker", sagemaker, only_slow=True, venv=".venv-sagemaker")]
