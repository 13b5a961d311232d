"""Run a command line in a fork of this process: what it imports is imported once."""

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
    """Call `main` with this command line, as a console script does, and return how the process ended.

    Args:
        main: What the console script calls.
        words: The command line with the program's name.
        directory: Where it runs, by default here.
        environ: Its environment, by default this process's.
        joined: Return stdout and stderr as one text.
        stdin: What it can read.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        child = os.fork()
        if child == 0:
            files = given.fileno(), out.fileno(), out.fileno() if joined else err.fileno()
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
