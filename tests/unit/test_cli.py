"""The command line as a user types it. Exit codes and streams matter, so most tests start a process."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from forked import run_forked

import ringdance
from horovod.runner.options import parse_args
from ringdance.errors import LaunchError, optional, pip_install
from ringdance.launch.parser import as_program
from ringdance.settings import SETTINGS
from ringdance.tools.cli import main


def ringdance_command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RINGDANCE_", "HOROVOD_"))}
    return run_forked(main, ["ringdance", *words], environ=clean | environ)


def test_version():
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"ringdance {ringdance.__version__}\n")


def test_help_names_the_commands_and_gives_examples():
    done = ringdance_command("--help")
    assert done.returncode == 0
    assert "ringdance run -np 2 python train.py" in done.stdout
    assert "settings" in done.stdout


@pytest.mark.parametrize("words", [[], ["dance"], ["settings", "--loud"]])
def test_what_cannot_be_understood_exits_with_2(words):
    done = ringdance_command(*words)
    assert done.returncode == 2
    assert "usage:" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("rnu -np 2 true", "run"),
        ("run --num-porc 2 true", "--num-proc"),
        ("run -np 2 --timestamp true", "--timestamps"),
        ("doctor --slotz 3", "--slots"),
        ("hosts copy --jsn x", "--json"),
        ("k8s manifes", "manifest"),
        ("data generate crietoo x", "criteo"),
    ],
)
def test_what_was_meant_is_told(line: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) if line.startswith("rnu") else contextlib.nullcontext():
        assert main(line.split()) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize("line", ["-np2", "-np 2", "-n 2", "-n2", "--num-proc=2"])
def test_the_number_of_ranks_in_all_spellings(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *line.split(), "--dry-run", sys.executable]) == 0
    assert re.search(r"^ranks: +2$", capsys.readouterr().out, re.MULTILINE)
    assert parse_args([*line.split(), "true"]).num_proc == 2


def test_an_interrupt_while_modules_are_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["data", "info", "x"]) == 130


def test_settings_shows_all_settings():
    done = ringdance_command("settings")
    assert done.returncode == 0
    assert done.stderr == ""
    for setting in SETTINGS:
        assert f"{setting.name} = " in done.stdout


def test_settings_changed():
    assert ringdance_command("settings", "--changed").stdout == "All settings have their default values.\n"
    done = ringdance_command("settings", "--changed", HOROVOD_FUSION_THRESHOLD="4194304")
    assert "fusion_threshold = 4194304 bytes   [environment variable HOROVOD_FUSION_THRESHOLD]" in done.stdout
    assert "default: 134217728 bytes" in done.stdout
    assert "cycle_time" not in done.stdout


def test_settings_tells_of_mistakes():
    done = ringdance_command("settings", RINGDANCE_CYCLETIME="2")
    assert done.returncode == 0
    assert "did you mean RINGDANCE_CYCLE_TIME?" in done.stderr
    done = ringdance_command("settings", RINGDANCE_CYCLE_TIME="soon")
    assert done.returncode == 2
    assert done.stderr.startswith("ringdance: RINGDANCE_CYCLE_TIME='soon' cannot be used: expected a")
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m ringdance settings | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk: No space left on device"),
        (OSError(errno.EACCES, "Permission denied", "/a"), "/a: Permission denied"),
        (OSError(errno.ECONNREFUSED, "Connection refused"), "ConnectionRefusedError: Connection refused"),
        (TimeoutError("timed out"), "TimeoutError: timed out"),
    ],
)
def test_what_the_system_refuses_is_said_in_one_line(error, text, capsys):
    def action():
        raise error

    assert as_program("ringdance x", action) == 2
    assert capsys.readouterr().err == f"ringdance x: {text}\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("from json import nothing", "cannot be imported: cannot import name 'nothing' from 'json'"),
        ("from broken import nothing", "cannot be imported: cannot import name 'nothing' from"),
        ("import no_such_part", "cannot be imported: No module named 'no_such_part'"),
    ],
)
def test_a_broken_package_is_not_called_missing(source, text, tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(LaunchError, match=f"^broken is installed, but {text}"):
        optional("broken.part", LaunchError, "X needs broken")
    with pytest.raises(LaunchError, match=r"^X needs missing: .*pip install missing$"):
        optional("missing.part", LaunchError, "X needs missing")


def test_run_passes_everything_on_to_the_launcher(monkeypatch):
    from ringdance.launch import cli as launch
    from ringdance.tools import cli

    seen: list[list[str]] = []
    monkeypatch.setattr(launch, "main", lambda argv, look: seen.append(list(argv)) or 7)
    words = ["-np", "2", "python", "x.py", "--version", "--help", "-h", "--", "settings"]
    assert cli.main(["run", *words]) == 7
    assert seen == [words]


def test_help_of_run_is_the_launcher_s():
    done = ringdance_command("run", "--help")
    assert done.returncode == 0
    assert "-np" in done.stdout


def test_no_advice_installs_ringdance_from_an_index() -> None:
    """This copy may come from a clone. A package with its name in an index may belong to anybody."""
    root = Path(__file__).resolve().parents[2]
    places = ("src", "compat", "docs", "examples", "benchmarks", "README.md")
    files = [file for place in places for file in [root / place, *(root / place).rglob("*")]]
    advice = re.compile(r"pip install[^\n`]*ringdance(\[|-horovod|['\"\n` ]|$)|'ringdance\[")
    texts = {file: file.read_text() for file in files if file.suffix in (".py", ".md")}
    assert not [f"{file}: {match[0]}" for file, text in texts.items() for match in advice.finditer(text)]
    assert pip_install("a", "b>=2").endswith("-m pip install a 'b>=2'")


def test_a_file_that_cannot_be_written_is_reported_in_one_line(tmp_path: Path) -> None:
    target = tmp_path / "no" / "file"
    done = ringdance_command("mpirun", "-wdir", str(target), "true")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(f": {target}: No such file or directory"), done.stderr
    assert "Traceback" not in done.stderr
