"""README.md and docs/: every code block is run, parsed or says why not, and links and figures are right."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from doc_blocks import PAGES, PARSED, ROOT, RUN, Block, blocks, difference, script

from ringdance.settings import Settings
from ringdance.tools.cli import main

BLOCKS = [block for page in PAGES for block in blocks(page)]
REASONS = ("needs a package index", "needs a network", "needs several machines", "needs Slurm", "needs a GPU")


def test_every_block_is_run_or_parsed_or_says_why_not(record_property) -> None:
    """Count the blocks, and list the blocks that are not run with their reasons."""
    not_run = []
    for block in BLOCKS:
        if "not run:" in block.marks:
            reason = block.marks["not run:"]
            assert reason.startswith(REASONS), f"{block.place}: {reason!r} is not one of {REASONS}"
            not_run.append(f"{block.place}: {reason}")
        elif "in" in block.marks:
            other = ROOT / block.marks["in"]
            assert block.page.name in other.read_text(), block.place
        elif "drawing" not in block.marks:
            good = block.language in (*RUN, *PARSED) or block.language.startswith("{")
            assert good, f"{block.place}: no test knows what to do with {block.language!r}"
    runnable = sum(block.belongs_to_page for block in BLOCKS)
    print(f"{len(BLOCKS)} blocks, {runnable} of them run. Not run:", *not_run, sep="\n  ")
    record_property("not run", not_run)
    assert runnable > 3 * len(not_run)


def test_pages_say_one_thing_about_gpus() -> None:
    """Only one page, gpus.md, says how gradients travel between GPUs and which machines were used."""
    old = re.compile(
        r"not been run on a GPU yet|NCCL is not used|NCCL's path not yet|from GPU to GPU too"
        r"|NCCL have no effect|not\s+been\s+tried\s+on\s+GPUs|(?:TensorFlow|JAX)[^.|]*are copied to the host"
    )
    for page in PAGES:
        assert page.name == "gpus.md" or not (found := old.search(page.read_text())), f"{page}: {found}"


def test_no_block_is_overlooked() -> None:
    for page in PAGES:
        fences = re.findall(r"^\s*(?:```|~~~|:::)", page.read_text(), re.M)
        visible = [block for block in blocks(page) if not {"hidden", "hidden file"} & block.marks.keys()]
        assert len(fences) == 2 * len(visible), page


def test_readers_see_the_files_that_their_commands_run() -> None:
    for page in PAGES:
        page_blocks = blocks(page)
        commands = "\n".join(
            b.text for b in page_blocks if b.language == "console" and "not run" not in b.marks
        )
        for name in (b.marks["hidden file"] for b in page_blocks if "hidden file" in b.marks):
            runs = re.search(rf"^\$ .*\b(?:python|sh|bash) {re.escape(name)}\b", commands, re.M)
            assert not runs, f"{page}: {name} is hidden, but a command of the page runs it"


def test_data_blocks_are_well_formed() -> None:
    data = [block for block in BLOCKS if block.language in PARSED]
    assert data
    for block in data:
        match block.language:
            case "toml":
                tomllib.loads(block.text)
            case "json":
                json.loads(block.text)
            case _:
                assert isinstance(yaml.safe_load(block.text), dict), block.place


def test_quoted_figures_are_those_of_the_benchmarks() -> None:
    """The figures that the README and "Coming from Horovod" quote are among the results of the benchmarks."""
    page = ROOT / "docs" / "howto" / "troubleshooting" / "benchmarks.md"
    results = page.read_text().partition("## Results")[2]
    page = (ROOT / "docs" / "coming-from-horovod.md").read_text()
    table = page.split("| measured |")[1].split("\n\n")[0]
    quoted = [text for row in table.splitlines()[2:] for text in re.findall(r"\d[\d.,]*", row.split("|")[3])]
    assert len(quoted) >= 4
    speed = (ROOT / "README.md").read_text().partition("## How fast it is")[2].partition("[All results]")[0]
    ratios = re.findall(r"\d\.\d+", speed)
    assert len(ratios) >= 4
    for text in [*quoted, *ratios]:
        assert re.search(rf"(?<![\d.]){re.escape(text)}", results), text


@pytest.mark.parametrize("page", [page for page in PAGES if script(page)], ids=lambda page: page.stem)
def test_python_blocks_compile(page: Path) -> None:
    compile(script(page), str(page), "exec")


def test_the_stall_warnings_time_is_the_default() -> None:
    page = "howto/troubleshooting/when-it-hangs-or-fails.md"
    for name in ("coming-from-horovod.md", "explanation/errors.md", page):
        named = re.findall(r"after (\d+) s(?:econds)?\b(?! \()", (ROOT / "docs" / name).read_text(), re.I)
        assert f"{Settings().stall_check_time:g}" in named, name


def commands_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """List the subcommands in the help of `ringdance WORDS`, and their subcommands."""
    with contextlib.suppress(SystemExit):
        main([*words, "--help"])
    out = capsys.readouterr().out
    listed = out.partition("\ncommands:\n")[2].partition("\n\n") if words else out.partition("\noptions:")
    names = re.findall(r"^ {2,4}([a-z]\w*)", listed[0], re.M)
    return [line for name in names for line in (" ".join([*words, name]), *commands_of(capsys, *words, name))]


def test_the_reference_has_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    shown = re.findall(r"^```\{output-of\} ringdance (.*?) ?--help$", page, re.M)
    assert sorted(shown) == sorted(["", *commands_of(capsys)])


def test_files_that_the_design_names_exist() -> None:
    named = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 10
    for name in named:
        assert (ROOT / "src" / "ringdance" / name).exists(), name


def test_extras_that_pages_install_exist() -> None:
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for page in PAGES:
        for used in re.findall(r"ringdance\[([\w,]+)\]|'\.\[([\w,]+)\]'", page.read_text()):
            assert set("".join(used).split(",")) <= known, (page, used)


def test_the_comparison_of_outputs_can_fail() -> None:
    def compared(shown: str, said: str, **marks: str) -> bool:
        return difference(Block(PAGES[0], 1, "console", "", marks), shown, said) is None

    assert compared("[0] a\n[1] b\n", "[0] a\n[1] b\n")
    assert not compared("[0] a\n[1] b\n", "[1] b\n[0] a\n")
    assert compared("[0] a\n[1] b\n", "[1] b\n[0] a\n", **{"any order": ""})
    assert compared("first\n...\nlast\n", "first\n2\n3\nlast\n")
    assert compared("first\n...\nlast\n", "first\nlast\n")
    assert not compared("first\n...\nlast\n", "first\n2\n")
    assert compared("loss ...\n", "loss 0.25\n")
    assert not compared("loss ...\n", "lost 0.25\n")
    assert compared("pid 4711\n", "pid 99\n", varies="4711")
    assert not compared("pid 4711\n", "pid 99\n")
    notices = "[0] I0000 00:00:17.5 16328 port.cc:153] oneDNN custom operations are on.\n"
    notices += "2026-01-01 00:00:00.1: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.\n"
    assert compared("[0] a\n", f"{notices}[0] a\n")
    assert not compared("[0] a\n", f"{notices}[0] W0000 b\n[0] a\n")
    assert compared("one\n  two\n", "one two\n", **{"joined lines": ""})


@pytest.mark.limit(250)
def test_every_page_is_reached_and_builds_without_warnings(tmp_path: Path) -> None:
    """Sphinx warns of broken links, pages outside the tables of contents, and unreadable docstrings."""
    # sphinx imports these to read all docstrings
    for name in ("sphinx", "torch", "tensorflow", "keras", "jax", "optax"):
        pytest.importorskip(name)
    # Everything is read and resolved but nothing is written, so it takes a third of the time.
    words = ["-W", "--keep-going", "-q", "-b", "dummy", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, str(ROOT / "docs"), str(tmp_path / "nothing")],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "doctrees" / "coming-from-horovod.doctree").exists()
