"""The Python blocks of README.md and docs/ run: all of them in one job of two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, environment, put_files, script, skip_if_some_were_missing, title

torch = pytest.importorskip("torch")

SCRIPTS = {page: text for page in PAGES if (text := script(page))}
# Each page in its own directory and namespace; the job goes on to the next page when all ranks are done.
DRIVER = """
import os, sys
from pathlib import Path
import ringdance.torch as hvd
hvd.init()
import doc_blocks
for page in sys.argv[2:]:
    directory = Path(sys.argv[1], Path(page).stem)
    os.chdir(directory)
    code = compile(doc_blocks.script(Path(page)), page, "exec")
    exec(code, {"__name__": "__main__"})
    hvd.barrier()
    (directory / f"done.{hvd.rank()}").touch()
"""


@pytest.fixture(scope="module")
def one_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The Python blocks of all pages, in one job of two ranks: its directory, and what it said."""
    directory = tmp_path_factory.mktemp("pages")
    for page in SCRIPTS:
        put_files(page, directory / page.stem)
    (directory / "driver.py").write_text(DRIVER)
    words = ["run", "-np", "2", "python", "driver.py", str(directory), *map(str, SCRIPTS)]
    environ = environment() | {"PYTHONPATH": str(ROOT / "tests"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", *words],
        cwd=directory, env=environ, text=True, timeout=400,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return directory, f"{done.stdout}\nexit code {done.returncode}"


@pytest.mark.limit(500)
@pytest.mark.parametrize("page", SCRIPTS, ids=title)
def test_the_python_blocks_of_a_page_run(page: Path, one_job: tuple[Path, str]) -> None:
    directory, said = one_job
    assert all((directory / page.stem / f"done.{rank}").exists() for rank in (0, 1)), said
    skip_if_some_were_missing(page)


def test_the_job_of_all_pages_ends_well(one_job: tuple[Path, str]) -> None:
    _, said = one_job
    assert said.endswith("exit code 0"), said
