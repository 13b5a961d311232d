"""Run a command line in a fork of this process, which saves importing its modules again."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess


def run_forked(
    main: Callable[[], int | None],
    words: Sequence[str],
    directory: Path | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    joined: bool = False,
    stdin: str = "",
) -> CompletedProcess[str]:
    """Call `main` with this command line, as a console script does, and return the outcome.

    Args:
        main: Function that the console script calls.
        words: Command line, including the program's name.
        directory: Working directory. Default: the current one.
        environ: Environment. Default: this process's environment.
        joined: If True, stdout and stderr are returned as one text.
        stdin: Text that the command can read from stdin.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        source.write(stdin.encode())
        source.seek(0)
        child = os.fork()
        if child == 0:
            files = source.fileno(), out.fileno(), out.fileno() if joined else err.fileno()
            _be(main, words, directory, environ, files)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        texts = [file.read().decode(errors="surrogateescape") for file in (out, err)]
        return CompletedProcess(list(words), os.waitstatus_to_exitcode(status), *texts)


def _be(
    main: Callable[[], int | None],
    words: Sequence[str],
    directory: Path | None,
    environ: Mapping[str, str] | None,
    files: tuple[int, int, int],
) -> None:
    code: object = 70
    try:
        for descriptor, file in enumerate(files):
            os.dup2(file, descriptor)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
        if directory is not None:
            os.chdir(directory)
        if environ is not None:
            os.environ.clear()
            os.environ.update(environ)
        sys.argv = list(words)
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
