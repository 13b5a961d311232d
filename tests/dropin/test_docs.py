"""The code blocks of README.md and docs/ that start processes do what the pages say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, Block, blocks, difference, missing, script

torch = pytest.importorskip("torch")

SCRIPTS = {page: text for page in PAGES if (text := script(page))}
COMMANDS = [
    page for page in PAGES
    if any(block.language in ("console", "sh") and block.belongs_to_page for block in blocks(page))
]  # fmt: skip
# Each page in its own folder and namespace; the job goes on to the next page when all ranks are done.
DRIVER = """
import os, sys
from pathlib import Path
import ringdance.torch as hvd
hvd.init()
import doc_blocks
for page in sys.argv[2:]:
    folder = Path(sys.argv[1], Path(page).stem)
    os.chdir(folder)
    code = compile(doc_blocks.script(Path(page)), page, "exec")
    exec(code, {"__name__": "__main__"})
    hvd.barrier()
    (folder / f"done.{hvd.rank()}").touch()
"""


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def environment() -> dict[str, str]:
    """That of a person who has just opened a shell in which the package is installed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RINGDANCE_", "HOROVOD_", "OMP_"))}
    kept |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", "COLUMNS": "100"}
    if os.getuid() == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept


def put_files(page: Path, folder: Path) -> None:
    """What the page's commands find in their folder: its own files, and what is in a clone."""
    folder.mkdir(exist_ok=True)
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    for block in blocks(page):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)


@pytest.fixture(scope="module")
def one_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The Python blocks of all pages, in one job of two ranks: its folder, and what it said."""
    folder = tmp_path_factory.mktemp("pages")
    for page in SCRIPTS:
        put_files(page, folder / page.stem)
    (folder / "driver.py").write_text(DRIVER)
    words = ["run", "-np", "2", "python", "driver.py", str(folder), *map(str, SCRIPTS)]
    environ = environment() | {"PYTHONPATH": str(ROOT / "tests"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", *words],
        cwd=folder, env=environ, text=True, timeout=400,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return folder, f"{done.stdout}\nexit code {done.returncode}"


@pytest.mark.limit(500)
@pytest.mark.parametrize("page", SCRIPTS, ids=title)
def test_the_python_blocks_of_a_page_run(page: Path, one_job: tuple[Path, str]) -> None:
    folder, said = one_job
    assert all((folder / page.stem / f"done.{rank}").exists() for rank in (0, 1)), said
    skip_if_some_were_missing(page)


def skip_if_some_were_missing(page: Path) -> None:
    """To be called at the end, so that pages whose blocks were not all run are listed with the reason."""
    reason = missing(page)
    if reason:
        pytest.skip(reason)


def test_the_job_of_all_pages_ends_well(one_job: tuple[Path, str]) -> None:
    _, said = one_job
    assert said.endswith("exit code 0"), said


@pytest.mark.limit(500)
@pytest.mark.parametrize("page", COMMANDS, ids=title)
def test_the_commands_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    put_files(page, tmp_path)
    for block in blocks(page):
        if block.language in ("console", "sh") and block.runs_here:
            for command, shown in block.commands():
                run(block, command, shown, tmp_path)
    skip_if_some_were_missing(page)


def run(block: Block, command: str, shown: str, folder: Path) -> None:
    # What `make` would do is not done here, but its targets must exist.
    command = command.replace("make ", "make --dry-run ", 1) if command.startswith("make ") else command
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder, env=environment() | {"XDG_STATE_HOME": str(folder / "state")}, text=True, timeout=150,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    where = f"{block.place}: {command}"
    assert done.returncode == int(block.marks.get("exit", 0)), f"{where}: {done.returncode}\n{done.stdout}"
    if block.language == "console" and shown:
        wrong = difference(block, shown, done.stdout)
        assert wrong is None, f"{where}\n{wrong}"
