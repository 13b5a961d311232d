"""The commands of README.md and docs/ print what the pages show."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from doc_blocks import (
    PAGES,
    Block,
    blocks,
    difference,
    environment,
    put_files,
    skip_if_some_were_missing,
    title,
)

pytest.importorskip("torch")

COMMANDS = [
    page for page in PAGES
    if any(block.language in ("console", "sh") and block.belongs_to_page for block in blocks(page))
]  # fmt: skip


LONG = [page for page in COMMANDS if any("slow" in block.marks for block in blocks(page))]


@pytest.mark.limit(500)
@pytest.mark.parametrize("page", COMMANDS, ids=title)
def test_the_commands_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    run_all([block for block in blocks(page) if "slow" not in block.marks], page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG, ids=title)
def test_the_slow_commands_of_a_page_do_too(page: Path, tmp_path: Path) -> None:
    run_all(blocks(page), page, tmp_path)


def run_all(chosen: list[Block], page: Path, directory: Path) -> None:
    """Run the commands of these blocks of a page, in their order."""
    put_files(page, directory)
    for block in chosen:
        if block.language in ("console", "sh") and block.runs_here:
            for command, shown in block.commands():
                run(block, command, shown, directory)
    skip_if_some_were_missing(page)


def run(block: Block, command: str, shown: str, directory: Path) -> None:
    # What `make` would do is not done here, but its targets must exist.
    command = command.replace("make ", "make --dry-run ", 1) if command.startswith("make ") else command
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory, env=environment() | {"XDG_STATE_HOME": str(directory / "state")}, text=True,
        timeout=150, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    where = f"{block.place}: {command}"
    assert done.returncode == int(block.marks.get("exit", 0)), f"{where}: {done.returncode}\n{done.stdout}"
    if block.language == "console" and shown:
        wrong = difference(block, shown, done.stdout)
        assert wrong is None, f"{where}\n{wrong}"
