"""Errors that scripts catch. The first two are Ringdance's own classes."""

from __future__ import annotations

from ringdance.errors import CollectiveError as HorovodInternalError
from ringdance.errors import HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """A framework's version differs from the one compiled against. Never raised: nothing is compiled here.

    Args:
        name: The framework.
        version: The imported version.
        installed_version: The version that was compiled against.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} {version} is in use, but the extension was built for {installed_version}.", name=name
        )
        self.version = version
        self.installed_version = installed_version
