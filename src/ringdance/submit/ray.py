"""Train on a Ray cluster. The ranks of one MPI world run on the nodes of a placement group, without ssh.

::

    executor = RayExecutor(RayExecutor.create_settings(), num_workers=8, use_gpu=True)
    executor.start()
    losses = executor.run(train, args=[epochs])   # one per rank
    executor.shutdown()
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringdance.errors import ArgumentError, LaunchError, optional

_Args = Sequence[Any] | None
_Kwargs = Mapping[str, Any] | None
_CLOSE_S = 5.0  # how long to wait for ranks to exit on their own


@dataclass(frozen=True)
class RaySettings:
    """An executor's settings, created by ``RayExecutor.create_settings``.

    Attributes:
        timeout_s: Seconds within which all ranks must start.
        placement_group_timeout_s: Seconds within which the cluster must allocate the resources.
    """

    timeout_s: float = 30.0
    placement_group_timeout_s: float = 100.0


class RayExecutor:
    """Long-lived ranks on a Ray cluster. They run the functions that are passed to the executor's methods.

    Args:
        settings: The result of ``create_settings``.
        num_workers: Number of ranks, packed onto as few nodes as possible.
        num_hosts: Number of nodes, each with ``num_workers_per_host`` ranks. Replaces ``num_workers``.
        num_workers_per_host: Number of ranks on each node. Used with ``num_hosts``.
        cpus_per_worker: Number of cores for each rank.
        use_gpu: If True, allocate GPUs for the ranks.
        gpus_per_worker: Number of GPUs for each rank. Default: 1.
        use_current_placement_group: If True and the caller runs in a placement group, use its bundles.
        min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout, override_discovery: Options
            for elastic training, which Ringdance does not support on Ray.

    Raises:
        ValueError: Arguments are missing, invalid or mutually exclusive.
        NotImplementedError: ``min_workers`` is set.
        LaunchError: Ray is not installed.
    """

    def __init__(
        self,
        settings: RaySettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers and not min_workers:
            raise ArgumentError("max_workers requires min_workers above 0.")
        if min_workers and num_workers:
            raise ArgumentError("min_workers and num_workers are mutually exclusive. Pass only one.")
        if min_workers:
            raise NotImplementedError("Elastic training on Ray is not supported. Pass num_workers.")
        if bool(num_workers) == bool(num_hosts):
            raise ArgumentError("Pass either num_workers, or num_hosts and num_workers_per_host.")
        if gpus_per_worker is not None and (not use_gpu or gpus_per_worker < 1):
            raise ArgumentError(
                "gpus_per_worker must be at least 1 and requires use_gpu=True, but got "
                f"gpus_per_worker={gpus_per_worker}, use_gpu={use_gpu}."
            )
        self._settings = settings
        self._bundles = [1] * num_workers if num_workers else [num_workers_per_host] * (num_hosts or 0)
        self._strategy = "PACK" if num_workers else "STRICT_SPREAD"
        self._cpus, self._gpus = cpus_per_worker, (gpus_per_worker or 1) if use_gpu else 0
        self._use_current = use_current_placement_group
        self._actors: list[Any] = []
        self._by_rank: list[Any] = []  # the actor that serves each rank
        self._group: Any = None
        self._job: Any = None

    @classmethod
    def create_settings(
        cls, timeout_s: float = 30, ssh_identity_file: str | None = None, ssh_str: str | None = None,
        placement_group_timeout_s: float = 100, nics: Any = None,
    ) -> RaySettings:
        """Create the settings for an executor. The ssh parameters have no effect, because ssh is not used.

        Args:
            timeout_s: Seconds within which all ranks must start.
            ssh_identity_file: No effect.
            ssh_str: No effect.
            placement_group_timeout_s: Seconds within which the cluster must provide the resources.
            nics: No effect.
        """
        return RaySettings(timeout_s, placement_group_timeout_s)

    # --- start -----------------------------------------------------------------------------------------

    def start(
        self, executable_cls: Callable[..., Any] | None = None, executable_args: _Args = None,
        executable_kwargs: _Kwargs = None, extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Reserve the resources and start the ranks.

        If ``executable_cls`` is set, each rank creates an instance of it.

        Raises:
            LaunchError: The cluster lacks the resources, or the ranks do not start. Nothing is left running
                or reserved.
        """
        if self._by_rank:
            raise LaunchError("The executor is already running. Call shutdown() first.")
        try:
            self._start(dict(extra_env_vars or {}))
            if executable_cls is not None:
                payload = _pack(executable_cls, executable_args, executable_kwargs)
                self._wait(self._all("make", payload))
        except BaseException:
            self.shutdown()
            raise

    def _start(self, environ: dict[str, str]) -> None:
        ray = _ray()
        from ringdance.submit.ray_nodes import Node

        group, indices = self._place(ray)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actor = ray.remote(Node)
        for index, workers in zip(indices, self._bundles, strict=True):
            options = actor.options(
                num_cpus=self._cpus * workers,
                num_gpus=self._gpus * workers,
                # Enough for the job itself and for concurrent calls to all ranks.
                max_concurrency=2 * sum(self._bundles) + 8,
                scheduling_strategy=strategy(group, placement_group_bundle_index=index),
            )
            self._actors.append(options.remote())
        places = ray.get([actor.where.remote() for actor in self._actors], timeout=self._settings.timeout_s)
        machines: dict[str, list[int]] = {}  # Ray may run several nodes on a machine; MPI counts machines
        for number, place in enumerate(places):
            machines.setdefault(place["host"], []).append(number)
        hosts = {name: sum(self._bundles[n] for n in numbers) for name, numbers in machines.items()}
        heads = {name: self._actors[numbers[0]] for name, numbers in machines.items()}
        job = uuid.uuid4().hex
        run = next(iter(heads.values())).run_job.remote
        self._job = run(job, list(hosts.items()), heads, places[0]["ip"], self._settings.timeout_s)
        waiting: list[Any] = []
        by_rank: list[Any] = []
        for name, numbers in machines.items():
            gpus = [gpu for number in numbers for gpu in places[number]["gpus"]]
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if self._gpus else {}
            setup = {"environ": {**environ, **visible}, "path": list(sys.path), "directory": os.getcwd()}
            ranks = list(range(len(by_rank), len(by_rank) + hosts[name]))
            connect = heads[name].connect_ranks.remote
            waiting.append(connect(job, ranks, setup, self._settings.timeout_s))
            by_rank += [heads[name]] * len(ranks)
        self._await_ranks(ray, waiting)
        self._by_rank = by_rank

    def _await_ranks(self, ray: Any, waiting: list[Any]) -> None:
        """Wait until ``connect_ranks`` has returned on all machines.

        Raises:
            LaunchError: The job ended first, or ranks did not start in time.
        """
        left = [*waiting, self._job]
        while set(left) & set(waiting):
            done, left = ray.wait(left)
            if self._job in done:
                raise LaunchError(ray.get(self._job) or "The ranks exited before they could be called.")
        if missing := [rank for silent in ray.get(waiting) for rank in silent]:
            raise LaunchError(
                f"Ranks {missing} of {sum(self._bundles)} did not start within "
                f"{self._settings.timeout_s:g} s. Pass a longer timeout_s to create_settings() if needed."
            )

    def _place(self, ray: Any) -> tuple[Any, Sequence[int]]:
        """Return a placement group and the indices of the bundles to use."""
        current = ray.util.get_current_placement_group() if self._use_current else None
        needs = [
            {"CPU": self._cpus * workers} | ({"GPU": self._gpus * workers} if self._gpus else {})
            for workers in self._bundles
        ]
        if current is not None:
            return current, _fitting(current.bundle_specs, needs)
        self._group = ray.util.placement_group(needs, strategy=self._strategy)
        if not self._group.wait(self._settings.placement_group_timeout_s):
            raise LaunchError(
                f"The cluster did not provide {needs} within {self._settings.placement_group_timeout_s:g} s "
                f"(placement_group_timeout_s in create_settings). Available: {ray.available_resources()}"
            )
        return self._group, range(len(needs))

    # --- calls -----------------------------------------------------------------------------------------

    def _call(self, rank: int, kind: str, payload: bytes) -> Any:
        if not self._by_rank:
            raise LaunchError("The executor is not running. Call start() first.")
        return self._by_rank[rank].call.remote(rank, kind, payload)

    def _all(self, kind: str, payload: bytes) -> list[Any]:
        return [self._call(rank, kind, payload) for rank in range(max(len(self._by_rank), 1))]

    def _wait(self, references: list[Any]) -> list[Any]:
        """Wait for the results to which Ray object references refer, and return them.

        The first failure shuts down all ranks, because others may be waiting for the failed rank.

        Raises:
            LaunchError: A rank failed.
        """
        ray = _ray()
        left = list(references)
        while left:
            done, left = ray.wait(left)
            try:
                ray.get(done)
            except ray.exceptions.RayError as error:
                self.shutdown()
                cause = getattr(error, "cause", None)
                raise LaunchError(str(cause or error)) from None
        return list(ray.get(references))

    def run(
        self, fn: Callable[..., Any], args: _Args = None, kwargs: _Kwargs = None, callbacks: Any = None
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on all ranks and return the results in rank order.

        Args:
            fn: Any function that cloudpickle can serialize.
            args: Positional arguments.
            kwargs: Keyword arguments.
            callbacks: No effect. Used by Horovod for elastic training.

        Raises:
            LaunchError: A rank failed. The message contains its traceback. All ranks are shut down. Call
                ``start()`` to start them again.
        """
        return self._wait(self.run_remote(fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., Any], args: _Args = None, kwargs: _Kwargs = None, callbacks: Any = None
    ) -> list[Any]:
        """Like ``run``, but return immediately, with Ray object references to the results in rank order."""
        return self._all("run", _pack(fn, args, kwargs))

    def execute(self, fn: Callable[[Any], Any], callbacks: Any = None) -> list[Any]:
        """Call ``fn(instance)`` on each rank with its instance from ``start()``. Return the results."""
        return self._wait(self._all("execute", _pack(fn)))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Like ``execute``, but call ``fn(instance)`` only on rank 0, and return its result."""
        return self._wait([self._call(0, "execute", _pack(fn))])[0]

    def shutdown(self) -> None:
        """Stop the ranks and release the resources."""
        ray = _ray()
        if self._actors:
            closing = [actor.close.remote(_CLOSE_S) for actor in self._actors[::-1]]
            ray.wait(closing, num_returns=len(closing), timeout=2 * _CLOSE_S)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self._actors, self._by_rank, self._group, self._job = [], [], None, None


def _ray() -> Any:
    optional("ray.util.scheduling_strategies", LaunchError, "RayExecutor needs Ray")
    return sys.modules["ray"]


def _pack(fn: Callable[..., Any], args: _Args = None, kwargs: _Kwargs = None) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps((fn, tuple(args or ()), dict(kwargs or {}))))


def _fitting(bundles: Sequence[Mapping[str, float]], needs: Sequence[Mapping[str, float]]) -> list[int]:
    """Choose a bundle in the placement group for each entry in ``needs``. Return the bundle indices.

    Raises:
        LaunchError: There are too few bundles, or they are too small.
    """
    chosen: list[int] = []
    for need in needs:
        large = [n for n, have in enumerate(bundles) if all(have.get(name, 0) >= need[name] for name in need)]
        free = [number for number in large if number not in chosen]
        if not free:
            raise LaunchError(
                f"The current placement group {list(bundles)} has no bundles for {list(needs)}. Enlarge it "
                "or pass use_current_placement_group=False."
            )
        chosen.append(free[0])
    return chosen
