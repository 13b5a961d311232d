"""The Python blocks of README.md and docs/, and scripts shown by pages, run in one job of two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_blocks import PAGES, blocks, difference, put_files, script, skip_if_some_were_missing, title
from script_jobs import LIMIT, Outcome, Task

torch = pytest.importorskip("torch")

SCRIPTS = {page: text for page in PAGES if (text := script(page))}
SHOWN = {
    f"{title(page)}: {command}": (block, command, shown)
    for page in PAGES for block in blocks(page) if "shared job" in block.marks
    for command, shown in block.commands()
}  # fmt: skip
PREFIXES = {"ringdance run -np 2 ": "[{}] ", "horovodrun -np 2 -H localhost:2 ": "[{}]<stdout>:", "": ""}
pytestmark = pytest.mark.limit(4 * LIMIT)


def parts(command: str) -> tuple[str, str, tuple[str, ...]]:
    """Split a command into its launcher, the script, and the script's arguments."""
    match = re.fullmatch(rf"({'|'.join(PREFIXES)})python (\S+\.py) ?(.*)", command)
    assert match, f"no job of two ranks runs {command!r}"
    return match[1], match[2], tuple(match[3].split())


def on_two_ranks(above: Path) -> dict[str, Task]:
    """Create a directory for each page, in which its blocks and scripts run."""
    places = {page: above / title(page).replace("/", "-") for page in PAGES}
    for page in {*SCRIPTS, *(block.page for block, _, _ in SHOWN.values())}:
        put_files(page, places[page])
    tasks = {title(page): Task(str(page), (), places[page], text) for page, text in SCRIPTS.items()}
    for number, (name, (block, command, _)) in enumerate(SHOWN.items()):
        start, path, words = parts(command)
        directory = above / f"shown.{number}"  # the runner names its files after this directory
        directory.symlink_to(places[block.page])
        tasks[name] = Task(str(directory / path), words, directory, alone=not start)
    return tasks


@pytest.mark.parametrize("page", SCRIPTS, ids=title)
def test_the_python_blocks_of_a_page_run(page: Path, shared_job: dict[str, Outcome]) -> None:
    done = shared_job[title(page)]
    assert done.code == 0, done.out + done.err
    skip_if_some_were_missing(page)


@pytest.mark.parametrize("name", SHOWN)
def test_a_script_prints_what_its_page_shows(name: str, shared_job: dict[str, Outcome]) -> None:
    done = shared_job[name]
    assert done.code == 0, done.out + done.err
    block, command, shown = SHOWN[name]
    wrong = difference(block, shown, said(done, PREFIXES[parts(command)[0]]))
    assert wrong is None, wrong


def said(done: Outcome, prefix: str) -> str:
    """Return the lines of all ranks as the launcher prints them."""
    lines = [
        prefix.format(rank) + line
        for rank in range(done.size)
        for line in Path(f"{done.directory}.{rank}.out").read_text().splitlines()
    ]
    return "\n".join(lines) + "\n"
