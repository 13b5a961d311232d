"""One tree for everything that Ringdance raises.

::

    RingdanceError
    ├── SettingError            (ValueError)    a setting has a value that cannot be used
    ├── ArgumentError           (ValueError)    a call's arguments are wrong; only this rank can see it
    │   └── DuplicateNameError                  a name is still in flight on this rank
    ├── LaunchError             (RuntimeError)  a job could not be started, or it failed
    ├── HostsUpdatedInterrupt   (RuntimeError)  the job's hosts have changed; no fault
    └── CollectiveError         (RuntimeError)  a collective failed (Horovod: HorovodInternalError)
        ├── NotInitializedError (ValueError)    init() has not been called, or shutdown() has
        ├── MismatchError                       ranks submitted different things under one name
        ├── ProcessSetRemovedError              the process set was removed while work was pending
        ├── ShutDownError                       a rank shut down or ended while others waited
        ├── RankLostError                       a rank died
        ├── StallError                          a rank did not submit in time
        │   └── DeadlockError                   ranks wait for operations that others never submitted
        └── EngineError                         the engine itself failed

After a MismatchError or ProcessSetRemovedError further collectives work; after the other CollectiveErrors the
job is over unless it is initialized again.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from types import ModuleType
from typing import TYPE_CHECKING

# Advice where a rank has made, or will have made, fewer steps than the others.
UNEVEN_STEPS = (
    "A rank that makes fewer steps than the others skipped one (`continue` or `return` before its backward "
    "pass, for instance: every rank has to make each step), or ran out of data: share it out evenly with "
    "hvd.shard(..., ends='pad') or ends='drop', or call hvd.join() after the last batch "
    "(DistributedDataParallel: with model.join():)."
)


def pip_install(*words: str) -> str:
    """Return the command that installs packages beside this copy of Ringdance.

    Args:
        words: packages, by the names of an index, and options of ``pip install``. Never "ringdance" itself:
            this copy may come from a clone, and a package of that name in an index from anybody.
    """
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *words])


def optional(
    module: str, error: type[BaseException], why: str = "", package: str = "", more: str = ""
) -> ModuleType:
    """Import a module of a package that not all need.

    Args:
        module: its name.
        error: raised where it is missing.
        why: the error's text before the advice; default: that of the ImportError.
        package: what to install, if it has another name than the module.
        more: the error's text after the advice.

    Raises:
        BaseException: `error`, with what to install, or why what is installed cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError) as missing:  # such as one that a newer NumPy does not have
        top = module.partition(".")[0]
        text = f"{why or missing}: {pip_install(package or top)}{more}"
        wanted = (missing.name or "").partition(".")[0]
        if wanted != top or not isinstance(missing, ModuleNotFoundError):
            text = f"{top} is installed, but cannot be imported: {missing}{more}"
        raise error(text) from None


class RingdanceError(Exception):
    """Base of all errors raised by Ringdance."""

    # Defined again, so that those which are ValueErrors too have exactly this one: by it TensorFlow knows an
    # error that it can raise again with the location in the user's function.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class SettingError(RingdanceError, ValueError):
    """A setting has a value that cannot be used; names the setting and where it came from."""


class ArgumentError(RingdanceError, ValueError):
    """A call's arguments are wrong. Raised at once, on the rank that made the call."""


class DuplicateNameError(ArgumentError):
    """The name is already in flight on this rank; wait for the first operation or use another name."""


class LaunchError(RingdanceError, RuntimeError):
    """A job could not be started, or one of its ranks failed."""


class HostsUpdatedInterrupt(RingdanceError, RuntimeError):
    """The job's hosts have changed: the training function ends, to start again with the ranks there are.

    Attributes:
        skip_sync: whether state need not be synchronised, as ranks were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The hosts of this job have changed.")
        self.skip_sync = skip_sync


class CollectiveError(RingdanceError, RuntimeError):
    """A collective operation failed."""


class NotInitializedError(CollectiveError, ValueError):
    """``init()`` has not been called in this process, or ``shutdown()`` has."""


class MismatchError(CollectiveError):
    """Ranks submitted different things under one name. Raised on all of them; the engine stays usable."""


class ProcessSetRemovedError(CollectiveError):
    """The process set was removed while this operation was pending. The engine stays usable."""


class ShutDownError(CollectiveError):
    """A rank shut down, or its program ended, while this operation was pending."""


class RankLostError(CollectiveError):
    """A rank died; names rank, host and process id."""


class StallError(CollectiveError):
    """A rank did not submit an operation within the stall shutdown time."""


class DeadlockError(StallError):
    """All ranks wait, each for an operation that another has not submitted: none can ever complete."""


class EngineError(CollectiveError):
    """The engine failed in a step; carries the cause."""

    @classmethod
    def of(cls, who: object, cause: BaseException) -> EngineError:
        """Return the error for all pending work of the rank ``who``."""
        kind = type(cause).__name__
        text = f"The engine of {who} failed: {kind}: {cause}"
        if not isinstance(cause, Exception):
            text = f"{who} was interrupted ({kind}) during an exchange."
        error = cls(text)
        error.__cause__ = cause
        return error
