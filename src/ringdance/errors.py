"""One tree for every exception that Ringdance raises.

::

    RingdanceError
    ├── SettingError            (ValueError)    a setting has an invalid value
    ├── ArgumentError           (ValueError)    a call's arguments are wrong; only this rank can see it
    │   └── DuplicateNameError                  a name is still in flight on this rank
    ├── LaunchError             (RuntimeError)  a job could not be started, or it failed
    ├── HostsUpdatedInterrupt   (RuntimeError)  the job's hosts have changed; not a fault
    └── CollectiveError         (RuntimeError)  a collective failed (Horovod: HorovodInternalError)
        ├── NotInitializedError (ValueError)    init() has not been called, or shutdown() has
        ├── MismatchError                       ranks submitted different requests under one name
        ├── ProcessSetRemovedError              the process set was removed while work was pending
        ├── ShutDownError                       a rank shut down or exited while others waited
        ├── RankLostError                       a rank died
        ├── StallError                          a rank did not submit in time
        │   └── DeadlockError                   ranks wait for operations that others never submitted
        └── EngineError                         the engine itself failed

After a MismatchError or ProcessSetRemovedError, further collectives work. After any other CollectiveError
the job is over unless it is initialized again.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from types import ModuleType
from typing import TYPE_CHECKING

# Advice for a rank that has made, or will have made, fewer steps than the others.
UNEVEN_STEPS = (
    "A rank that makes fewer steps than the others skipped one (for instance by `continue` or `return` "
    "before its backward pass: every rank must make each step), or ran out of data: divide it evenly with "
    "hvd.shard(..., ends='pad') or ends='drop', or call hvd.join() after the last batch "
    "(DistributedDataParallel: with model.join():)."
)


def pip_install(*words: str) -> str:
    """Return the command that installs packages next to this copy of Ringdance.

    Args:
        words: Package names in an index, and options of ``pip install``. Never "ringdance" itself: this
            copy may come from a clone, and anybody can publish a package of that name in an index.
    """
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *words])


def optional(
    module: str, error: type[BaseException], why: str = "", package: str = "", more: str = ""
) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Name of the module.
        error: Type to raise if the module is missing.
        why: Text of the error before the advice. By default, the text of the ImportError.
        package: Package to install, if its name differs from the module's.
        more: Text of the error after the advice.

    Raises:
        BaseException: An ``error`` that says what to install, or why the installed package cannot be
            imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as missing:  # AttributeError: a name that a newer NumPy removed
        top = module.partition(".")[0]
        text = f"{why or missing}: {pip_install(package or top)}{more}"
        wanted = (missing.name or "").partition(".")[0]
        if wanted != top or not isinstance(missing, ModuleNotFoundError):
            text = f"{top} is installed, but cannot be imported: {missing}{more}"
        raise error(text) from None


class RingdanceError(Exception):
    """Base of all exceptions raised by Ringdance."""

    # Defined again so that subclasses that are also ValueErrors have exactly this one. TensorFlow uses it
    # to recognize errors that it can raise again with the location in the user's function.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class SettingError(RingdanceError, ValueError):
    """A setting has an invalid value. The message names the setting and where it came from."""


class ArgumentError(RingdanceError, ValueError):
    """A call's arguments are wrong. Raised immediately, on the rank that made the call."""


class DuplicateNameError(ArgumentError):
    """The name is already in flight on this rank. Wait for the first operation or use another name."""


class LaunchError(RingdanceError, RuntimeError):
    """A job could not be started, or one of its ranks failed."""


class HostsUpdatedInterrupt(RingdanceError, RuntimeError):
    """The job's hosts have changed: the training function ends, to restart with the current ranks.

    Attributes:
        skip_sync: True if state need not be synchronized, because ranks were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of this job have changed.")
        self.skip_sync = skip_sync


class CollectiveError(RingdanceError, RuntimeError):
    """A collective operation failed."""


class NotInitializedError(CollectiveError, ValueError):
    """``init()`` has not been called in this process, or ``shutdown()`` has."""


class MismatchError(CollectiveError):
    """Ranks submitted different requests under one name. Raised on all of them. The engine stays usable."""


class ProcessSetRemovedError(CollectiveError):
    """The process set was removed while this operation was pending. The engine stays usable."""


class ShutDownError(CollectiveError):
    """A rank shut down, or its program exited, while this operation was pending."""


class RankLostError(CollectiveError):
    """A rank died. The message names rank, host and process id."""


class StallError(CollectiveError):
    """A rank did not submit an operation within the stall shutdown time."""


class DeadlockError(StallError):
    """All ranks wait for operations that another rank has not submitted. None of them can ever complete."""


class EngineError(CollectiveError):
    """The engine failed in a step. The message gives the cause."""

    @classmethod
    def of(cls, who: object, cause: BaseException) -> EngineError:
        """Build the error for all pending work of the rank ``who``."""
        kind = type(cause).__name__
        text = f"The engine of {who} failed: {kind}: {cause}"
        if not isinstance(cause, Exception):
            text = f"{who} was interrupted ({kind}) during an exchange."
        error = cls(text)
        error.__cause__ = cause
        return error
