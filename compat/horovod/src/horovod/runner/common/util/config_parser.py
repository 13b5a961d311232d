"""Options that become ``HOROVOD_*`` variables, and the configuration file (YAML) that can hold them.

A single table lists the attribute of the parsed arguments, the variable, the section and key of the file, and
the type. The command line takes precedence over the file, and both over the caller's environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "SETTINGS", "read_config", "set_args_from_config", "set_env_from_args", "unknown_keys",
    "validate_config_args",
]  # fmt: skip


def number(text: Any) -> int | float:
    """Return a number, as an int if it is whole. Raises ValueError if ``text`` is not a number."""
    value = float(text)
    return int(value) if value.is_integer() else value


@dataclass(frozen=True)
class Setting:
    """One option that becomes a variable.

    Attributes:
        dest: Attribute of the parsed arguments. The option is ``--`` and this name with dashes.
        env: Name of the variable, without ``HOROVOD_``.
        section, key: Section and key in the configuration file.
        kind: Type of the value: bool, int, float, str, or ``number``.
        inverted: If True, the file's value is the opposite of the attribute's.
    """

    dest: str
    env: str
    section: str
    key: str
    kind: Callable[[Any], Any]
    inverted: bool = False

    @property
    def option(self) -> str:
        """The option as typed on the command line."""
        return "--" + self.dest.replace("_", "-")

    @property
    def variable(self) -> str:
        """The full name of the environment variable."""
        return f"HOROVOD_{self.env}"

    def text(self, value: Any) -> str:
        """Return the variable's text for a value of the attribute."""
        if self.dest == "fusion_threshold_mb":
            value *= 1 << 20
        if self.dest == "log_with_timestamp":  # The variable means that the time is hidden.
            value = not value
        return str(int(value) if isinstance(value, bool) else value)


SETTINGS = (
    Setting("fusion_threshold_mb", "FUSION_THRESHOLD", "params", "fusion_threshold_mb", int),
    Setting("cycle_time_ms", "CYCLE_TIME", "params", "cycle_time_ms", float),
    Setting("cache_capacity", "CACHE_CAPACITY", "params", "cache_capacity", int),
    Setting("hierarchical_allreduce", "HIERARCHICAL_ALLREDUCE", "params", "hierarchical_allreduce", bool),
    Setting("hierarchical_allgather", "HIERARCHICAL_ALLGATHER", "params", "hierarchical_allgather", bool),
    Setting("torus_allreduce", "TORUS_ALLREDUCE", "params", "torus_allreduce", bool),
    Setting("autotune", "AUTOTUNE", "autotune", "enabled", bool),
    Setting("autotune_log_file", "AUTOTUNE_LOG", "autotune", "log_file", str),
    Setting("autotune_warmup_samples", "AUTOTUNE_WARMUP_SAMPLES", "autotune", "warmup_samples", int),
    Setting("autotune_steps_per_sample", "AUTOTUNE_STEPS_PER_SAMPLE", "autotune", "steps_per_sample", int),
    Setting("autotune_bayes_opt_max_samples", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune",
         "bayes_opt_max_samples", int),
    Setting("autotune_gaussian_process_noise", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune",
         "gaussian_process_noise", float),
    Setting("timeline_filename", "TIMELINE", "timeline", "filename", str),
    Setting("timeline_mark_cycles", "TIMELINE_MARK_CYCLES", "timeline", "mark_cycles", bool),
    Setting("no_stall_check", "STALL_CHECK_DISABLE", "stall_check", "enabled", bool, inverted=True),
    Setting("stall_check_warning_time_seconds", "STALL_CHECK_TIME_SECONDS", "stall_check",
         "warning_time_seconds", number),
    Setting("stall_check_shutdown_time_seconds", "STALL_SHUTDOWN_TIME_SECONDS", "stall_check",
         "shutdown_time_seconds", number),
    Setting("mpi_threads_disable", "MPI_THREADS_DISABLE", "library_options", "mpi_threads_disable", bool),
    Setting("num_nccl_streams", "NUM_NCCL_STREAMS", "library_options", "num_nccl_streams", int),
    Setting("thread_affinity", "THREAD_AFFINITY", "library_options", "thread_affinity", str),
    Setting("gloo_timeout_seconds", "GLOO_TIMEOUT_SECONDS", "library_options", "gloo_timeout_seconds",
            number),
    Setting("log_level", "LOG_LEVEL", "logging", "level", str),
    Setting("log_with_timestamp", "LOG_HIDE_TIME", "logging", "with_timestamp", bool),
)  # fmt: skip

# HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD" and so on: scripts import the names from here.
globals().update({setting.variable: setting.variable for setting in SETTINGS})

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_CONTROLLERS = ("gloo", "mpi")


def read_config(path: str) -> dict[str, Any]:
    """Return the mapping in a configuration file.

    Raises:
        ValueError: The file cannot be read, is not YAML, or is not a mapping. The message names the file.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file) or {}
    except OSError as error:
        raise ValueError(f"--config-file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config-file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config-file {path}: expected sections such as `params:`, found {config!r}")
    return config


def unknown_keys(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield sections and keys (``section.key``) that are unknown."""
    known = {(setting.section, setting.key) for setting in SETTINGS}
    for section, content in config.items():
        if section == "controller":
            continue
        if section not in {name for name, _ in known}:
            yield str(section)
        else:
            yield from (f"{section}.{key}" for key in content or () if (section, key) not in known)


def set_args_from_config(
    args: argparse.Namespace, config: Mapping[str, Any], override_args: Collection[str] = ()
) -> None:
    """Set attributes from ``config``, except those in ``override_args``, which the command line has set.

    Raises:
        ValueError: A value has the wrong type, or the controller is unknown.
    """
    given = {"use_gloo", "use_mpi", "use_jsrun"} & set(override_args)
    controller = config.get("controller")
    if controller is not None:
        if controller not in _CONTROLLERS:
            raise ValueError(f"controller={controller} must be one of {', '.join(_CONTROLLERS)}")
        if not given:
            setattr(args, f"use_{controller}", True)
    for setting in SETTINGS:
        content = config.get(setting.section)
        if content is not None and not isinstance(content, dict):
            raise ValueError(f"{setting.section}: expected keys with values, found {content!r}")
        value = (content or {}).get(setting.key)
        if value is not None and setting.dest not in override_args:
            value = _convert(setting, value)
            setattr(args, setting.dest, not value if setting.inverted else value)


def _convert(setting: Setting, value: Any) -> Any:
    name = f"{setting.section}.{setting.key}={value}"
    if setting.kind is bool:
        if value not in (True, False):  # 1 and 0 are valid too.
            raise ValueError(f"{name} must be true or false")
        return bool(value)
    cores = setting.dest == "thread_affinity" and type(value) is list
    if isinstance(value, bool | dict | list) and not cores:
        raise ValueError(f"{name} must be one value")
    if isinstance(value, list):
        return ",".join(map(str, value))
    try:
        return setting.kind(value)
    except ValueError:
        raise ValueError(f"{name} must be a number") from None


def validate_config_args(args: argparse.Namespace) -> None:
    """Check the values, wherever they come from.

    Raises:
        ValueError: ``name=value must be ...``.
    """
    for setting in SETTINGS:
        value = getattr(args, setting.dest, None)
        if value is None:
            continue
        problem = ""
        if setting.dest == "autotune_gaussian_process_noise":
            problem = "" if 0 <= value <= 1 else "between 0 and 1"
        elif setting.dest == "log_level":
            problem = "" if str(value).upper() in _LEVELS else "one of " + ", ".join(_LEVELS)
        elif setting.dest == "thread_affinity":
            cores = str(value).split(",")
            problem = "" if all(core.strip().isdecimal() for core in cores) else "core numbers, such as 0,2"
        elif setting.kind not in (bool, str):
            problem = "" if value >= 0 else ">= 0"
        if problem:
            raise ValueError(f"{setting.dest}={value} must be {problem}")


def set_env_from_args(env: MutableMapping[str, str], args: argparse.Namespace) -> MutableMapping[str, str]:
    """Set the variables for all values in ``args``, leave other variables unchanged, and return ``env``."""
    for setting in SETTINGS:
        value = getattr(args, setting.dest, None)
        if value is None:
            continue
        if setting.dest.startswith("autotune_") and not args.autotune:
            continue
        if setting.dest == "timeline_mark_cycles" and not args.timeline_filename:
            continue
        env[setting.variable] = setting.text(value)
    if getattr(args, "tcp_flag", None):
        env["NCCL_IB_DISABLE"] = "1"
    if getattr(args, "nics", None):
        env["NCCL_SOCKET_IFNAME"] = ",".join(sorted(args.nics))
    return env
