"""Exceptions that Ringdance raises.

The exceptions form the following hierarchy::

    RingdanceError
    ├── SettingError            (ValueError)    the value of a setting is invalid
    ├── ArgumentError           (ValueError)    invalid arguments, detected on the calling rank alone
    │   └── DuplicateNameError                  another operation with this name is in flight
    ├── LaunchError             (RuntimeError)  a job could not be started, or it failed
    ├── HostsUpdatedInterrupt   (RuntimeError)  the job's hosts have changed; not a fault
    └── CollectiveError         (RuntimeError)  a collective failed (Horovod: HorovodInternalError)
        ├── NotInitializedError (ValueError)    called before init() or after shutdown()
        ├── MismatchError                       ranks submitted different requests under the same name
        ├── ProcessSetRemovedError              the process set was removed while work was pending
        ├── ShutDownError                       a rank shut down or exited while others waited
        ├── RankLostError                       a rank died
        ├── StallError                          a rank did not submit an operation in time
        │   └── DeadlockError                   ranks wait for operations that others will never submit
        └── EngineError                         the engine itself failed

The engine stays usable after a MismatchError or ProcessSetRemovedError. After any other CollectiveError, no
collective works until the ranks call ``init()`` again.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from types import ModuleType
from typing import TYPE_CHECKING

# Advice for jobs in which a rank finishes before the others, because it runs fewer steps.
UNEVEN_STEPS = (
    "A rank that runs fewer steps than the others has either skipped a step (for instance, with `continue` "
    "or `return` before its backward pass) or run out of data. All ranks must run the same number of steps: "
    "divide the data evenly with hvd.shard(..., ends='pad') or ends='drop', or call hvd.join() after the "
    "last batch (with DistributedDataParallel, use `with model.join():`)."
)


def pip_install(*words: str) -> str:
    """Return the command that installs packages into the environment that Ringdance is running in.

    Args:
        words: Package names and options for ``pip install``. Must not include "ringdance" itself, because
            this copy may come from a clone, and anyone can publish a package with that name on an index.
    """
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *words])


def optional(
    module: str, error: type[BaseException], why: str = "", package: str = "", more: str = ""
) -> ModuleType:
    """Import a module from an optional dependency.

    Args:
        module: Name of the module.
        error: Type to raise if the module is missing.
        why: Start of the error message, before the install command. Default: the ImportError's message.
        package: Package to install, if its name differs from the module name.
        more: Text appended to the message.

    Raises:
        BaseException: The module cannot be imported. The exception has the type ``error``, and its message
            says what to install, or why the installed package cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as missing:  # AttributeError: built for an older NumPy
        top = module.partition(".")[0]
        text = f"{why or missing}: {pip_install(package or top)}{more}"
        wanted = (missing.name or "").partition(".")[0]
        if wanted != top or not isinstance(missing, ModuleNotFoundError):
            text = f"{top} is installed, but cannot be imported: {missing}{more}"
        raise error(text) from None


class RingdanceError(Exception):
    """Base of all exceptions raised by Ringdance."""

    # Ensures that subclasses that also derive from ValueError inherit ``Exception.__init__``. TensorFlow
    # checks for this method before it re-raises an error with the location in the user's function.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class SettingError(RingdanceError, ValueError):
    """A setting has an invalid value. The message names the setting and the origin of the value."""


class ArgumentError(RingdanceError, ValueError):
    """A call has invalid arguments. Raised immediately, on the rank that made the call."""


class DuplicateNameError(ArgumentError):
    """Another operation with this name is in flight on this rank. Wait for it, or use a different name."""


class LaunchError(RingdanceError, RuntimeError):
    """A job could not be started, or one of its ranks failed. The message is ``problem``, then ``fix``.

    Attributes:
        problem: What is wrong.
        fix: What to do about it, or "" if unknown, for callers that show the advice separately.
    """

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(f"{problem}. {fix}" if fix else problem)
        self.problem, self.fix = problem, fix


class HostsUpdatedInterrupt(RingdanceError, RuntimeError):
    """The job's hosts have changed. Raise this exception to restart the training function.

    Attributes:
        skip_sync: True if ranks were only removed, so the state does not need to be synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of this job have changed.")
        self.skip_sync = skip_sync


class CollectiveError(RingdanceError, RuntimeError):
    """A collective operation failed."""


class NotInitializedError(CollectiveError, ValueError):
    """This process is not in a job: the call was made before ``init()`` or after ``shutdown()``."""


class MismatchError(CollectiveError):
    """Ranks submitted different requests with the same name. Raised on all ranks. The engine stays usable."""


class ProcessSetRemovedError(CollectiveError):
    """The process set was removed while this operation was pending. The engine stays usable."""


class ShutDownError(CollectiveError):
    """A rank shut down, or its program exited, while this operation was pending."""


class RankLostError(CollectiveError):
    """A rank died. The message gives its rank, host and process ID."""


class StallError(CollectiveError):
    """A rank did not submit an operation within ``stall_shutdown_time``."""


class DeadlockError(StallError):
    """Every rank is waiting for an operation that another rank has not submitted, so none can complete."""


class EngineError(CollectiveError):
    """The engine itself failed. The message gives the cause."""

    @classmethod
    def of(cls, who: object, cause: BaseException) -> EngineError:
        """Return the error to raise from all pending operations when the engine on rank ``who`` fails."""
        kind = type(cause).__name__
        text = f"The engine on {who} failed: {kind}: {cause}"
        if not isinstance(cause, Exception):
            text = f"{who} was interrupted ({kind}) during an exchange."
        error = cls(text)
        error.__cause__ = cause
        return error
