"""The commands of README.md and docs/ print what the pages show."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import (
    PAGES,
    ROOT,
    Block,
    blocks,
    difference,
    environment,
    put_files,
    skip_if_some_were_missing,
    title,
)
from forked import run_forked
from sampled import sampled

from ringdance.tools.cli import main

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")

COMMANDS = [
    page for page in PAGES
    if any(block.language in ("console", "sh") and block.belongs_to_page for block in blocks(page))
]  # fmt: skip


LONG = [page for page in COMMANDS if any("slow" in block.marks for block in blocks(page))]
# These commands do not start ranks, so they run in a fork of this process, which has imported their code.
FORKED = re.compile(
    r"ringdance (?:data|plan|report|timeline|advise|explain|settings|recipes|slurm|k8s|sagemaker)\b"
    r"[^|&;<>()$`~]*"
)


@pytest.mark.limit(500)
@pytest.mark.parametrize("page", sampled("pages", COMMANDS, 12, [ROOT / "README.md"]), ids=title)
def test_the_commands_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    run_all([block for block in blocks(page) if "slow" not in block.marks], page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG, ids=title)
def test_the_slow_commands_of_a_page_do_too(page: Path, tmp_path: Path) -> None:
    run_all(blocks(page), page, tmp_path)


def run_all(chosen: list[Block], page: Path, directory: Path) -> None:
    """Run the commands of a page's blocks in order."""
    put_files(page, directory)
    for block in chosen:
        if block.language in ("console", "sh") and block.runs_here:
            for command, shown in block.commands():
                run(block, command, shown, directory)
    skip_if_some_were_missing(page)


def run(block: Block, command: str, shown: str, directory: Path) -> None:
    # `make` is only a dry run here, which checks that its targets exist.
    command = command.replace("make ", "make --dry-run ", 1) if command.startswith("make ") else command
    start = in_a_fork if FORKED.fullmatch(command) else in_a_shell
    code, said = start(command, directory, environment() | {"XDG_STATE_HOME": str(directory / "state")})
    where = f"{block.place}: {command}"
    assert code == int(block.marks.get("exit", 0)), f"{where}: {code}\n{said}"
    if block.language == "console" and shown:
        wrong = difference(block, shown, said)
        assert wrong is None, f"{where}\n{wrong}"


def in_a_shell(command: str, directory: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Run a command and return its exit code and output."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory, env=environ, text=True, timeout=150, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def in_a_fork(command: str, directory: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Run a `ringdance` command in a fork of this process and return its exit code and output."""
    program, *words = shlex.split(command)
    path = str(Path(sys.executable).with_name(program))
    done = run_forked(main, [path, *words], directory, environ, joined=True)
    return done.returncode, done.stdout
