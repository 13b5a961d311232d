"""Decide which environment variables are forwarded to other hosts, and which values may be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ringdance.host.schedulers.detect import STAYS

# Variables specific to a machine, a login or a rank. They are never forwarded.
_STAYS = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|HOME|USER|LOGNAME|MAIL|SHELL|TERM.*|LS_COLORS|DISPLAY|WAYLAND_.*"
    r"|HOSTNAME|TMPDIR|TMP|TEMP|TEMPDIR|KRB5CCNAME|XAUTHORITY|ICEAUTHORITY|GPG_TTY|SSH_.*|XDG_.*|DBUS_.*"
    r"|.*CUDA_VISIBLE_DEVICES|.*ROCR_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY"
    rf"|NVIDIA_.*|RINGDANCE_JOB|{STAYS}"
)
# Settings, which must be the same on all ranks and are therefore always forwarded.
_GOES = re.compile(r"(RINGDANCE|HOROVOD|OMPI|OPAL|PMIX|PRTE|MPICH|MPIR_CVAR|HYDRA|I_MPI|FI|UCX|NCCL)_.*")
_SECRET = re.compile(
    r"(?i)secret|token(?!i[sz]er)|passw|passphrase|_pwd$|credential|private(?!_data)|(api|access)_?key"
    r"|(?<!_sort)(?<!_image)(?<!_label)_key$|auth(?!or|enticated)|connection_?string"
)
# Token counts and on/off switches are never secret.
_PLAIN = re.compile(r"(?i).*tokens(_.*)?=[\d.]+[kmb]?|.*=(true|false|yes|no|on|off|[01])")
_USER_IN_URL = re.compile(r"://[^/\s]+@")
_SET_IN_TEXT = re.compile(r"""\b([A-Za-z_][\w-]*)=((\\*["'])?(?(3).*?(?:\3|$)|[^\s"'\\]+))""")


def forwarded(own: Mapping[str, str], everything: bool = True) -> dict[str, str]:
    """Return the variables in ``own`` that are forwarded to ranks on other hosts.

    Args:
        own: The launcher's environment.
        everything: If False, forward only settings for Ringdance, MPI and communication libraries. Variables
            specific to a machine, a login or a rank are never forwarded.
    """
    return {
        name: value
        for name, value in own.items()
        if (everything or _GOES.fullmatch(name)) and not _STAYS.fullmatch(name)
    }


def is_secret(name: str, value: str = "") -> bool:
    """Return True if a variable or option may hold a secret, judging by its name or a user name in a URL."""
    name = "_" + name.replace("-", "_")
    named = _SECRET.search(name) and not _PLAIN.fullmatch(f"{name}={value}")
    return bool(named or _USER_IN_URL.search(value))


def shown(name: str, value: str) -> str:
    """Return the value, or a placeholder if it may be secret."""
    return "(not shown)" if is_secret(name, value) else value


def shown_text(text: str) -> str:
    """Hide the value of each ``NAME=VALUE`` that may be secret in a text, such as a command line."""
    return _SET_IN_TEXT.sub(lambda found: f"{found[1]}={shown(found[1], found[2])}", text)
