"""The code blocks of README.md and docs/: found, classified, and what a test has to do with each.

A block's language decides what is done with it:

- ``python``: the blocks of a page, in their order, are one script that runs on two ranks;
- ``console``: each ``$ command`` runs in the page's directory; what follows is the output that it must have.
  Lines of the output that are ``...`` stand for any text;
- ``sh``: each line runs as a command in the page's directory;
- ``toml``, ``yaml``, ``json``: parsed;
- ``{directive}``: content that Sphinx makes; the build of the pages checks it.

An HTML comment before a block, which readers do not see, says more (several are separated by ``;``):

- ``<!-- test: file NAME -->``: not run, but written to that file of the page's directory for later commands;
- ``<!-- test: exit N -->``: the exit code of the commands (0);
- ``<!-- test: varies WORD WORD -->``: these words of the output are examples;
- ``<!-- test: any order -->``: of the lines of the output;
- ``<!-- test: joined lines -->``: lines of the output are broken for reading only;
- ``<!-- test: needs MODULE MODULE -->``: run only where these can be imported;
- ``<!-- test: slow -->``: commands that only `make test-all` runs;
- ``<!-- test: in PATH -->``: the test file of that path runs it;
- ``<!-- test: shared job -->``: the scripts run in one job of two ranks with those of other pages;
- ``<!-- test: drawing -->``: no code;
- ``<!-- test: not run: REASON -->``.

A comment ``<!-- test: hidden`` with code on the lines below is a Python block that readers do not see;
with ``hidden file NAME``, a file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[^\s`]*)[^\n]*\n(?P<text>.*?)^ *(?P=ticks)$", re.M | re.S
)
_MARK = re.compile(r"^<!-- test: (?P<marks>[^\n]*?)(?: -->|\n(?P<text>.*?)^-->)$", re.M | re.S)
_KNOWN = (
    "file", "exit", "varies", "any order", "joined lines", "in", "drawing", "not run:", "needs",
    "hidden file", "hidden", "slow", "shared job",
)  # fmt: skip
# What TensorFlow and XLA write to stderr depends on the processor and the machine.
_NOTICE = re.compile(
    r"^(?:\[\d+\](?:<\w+>:| ))?(?:WARNING: All log messages before absl::InitializeLog|[IWE]0000 00:00:"
    r"|\d{4}-\d\d-\d\d \S+: [IWE] (?:tensorflow|external)/|To enable the following instructions:).*\n?",
    re.M,
)
RUN = ("python", "console", "sh")
PARSED = ("toml", "yaml", "json")


@dataclass(frozen=True)
class Block:
    """A block of a page.

    Attributes:
        page: the file.
        line: number of its first line of text.
        language: as written behind the fence.
        text: its lines.
        marks: what the comment before it says, by kind.
    """

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file(self) -> str | None:
        return self.marks.get("file") or self.marks.get("hidden file")

    @property
    def belongs_to_page(self) -> bool:
        """Whether it is to be run as part of its page, by those who have what it needs."""
        return self.language in RUN and not {"not run:", "in", "drawing", "shared job"} & self.marks.keys()

    @property
    def missing(self) -> list[str]:
        """The modules it needs that are not here."""
        return [name for name in self.marks.get("needs", "").split() if not importlib.util.find_spec(name)]

    @property
    def runs_here(self) -> bool:
        """Whether it is run as part of its page."""
        return self.belongs_to_page and not self.missing

    def commands(self) -> list[tuple[str, str]]:
        """Commands with the output that is shown for each."""
        if self.language == "sh":
            return [(line, "") for line in self.text.splitlines() if line and not line.startswith("#")]
        found: list[tuple[str, str]] = []
        for line in self.text.splitlines(keepends=True):
            if line.startswith("$ "):
                found.append((line[2:].rstrip("\n"), ""))
            else:
                command, output = found.pop()
                found.append((command, output + line))
        return found


def _marks(text: str) -> dict[str, str]:
    found = {}
    for mark in filter(None, (part.strip() for part in text.split(";"))):
        kind = next((known for known in _KNOWN if mark == known or mark.startswith(known + " ")), None)
        if kind is None:
            raise ValueError(f"unknown mark {mark!r}")
        found[kind] = mark.removeprefix(kind).strip()
    return found


def missing(page: Path) -> str:
    """What keeps blocks of a page from being run here; empty if nothing does."""
    found = {name for block in blocks(page) if block.belongs_to_page for name in block.missing}
    return f"ran without the blocks that need {', '.join(sorted(found))}" if found else ""


def blocks(page: Path) -> list[Block]:
    """All blocks of a page in their order, hidden ones too.

    Raises:
        ValueError: a mark that is not known, or that stands before no block.
    """
    text = page.read_text()
    found: list[Block] = []
    ahead: dict[str, str] = {}
    position = 0
    while True:
        fence, mark = _FENCE.search(text, position), _MARK.search(text, position)
        if mark and (fence is None or mark.start() < fence.start()):
            marks = _marks(mark["marks"])
            if mark["text"] is None:
                ahead |= marks
            else:
                line = text.count("\n", 0, mark.start("text")) + 1
                found.append(Block(page, line, "python", mark["text"], marks))
            position = mark.end()
        elif fence:
            line = text.count("\n", 0, fence.start("text")) + 1
            found.append(Block(page, line, fence["language"], textwrap.dedent(fence["text"]), ahead))
            ahead, position = {}, fence.end()
        else:
            break
    if ahead:
        raise ValueError(f"{page}: {ahead} stands before no block")
    return found


def script(page: Path) -> str:
    """The page's Python blocks as one script whose lines have the numbers that they have in the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and block.runs_here and block.file is None:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines)


def difference(block: Block, shown: str, said: str) -> str | None:
    """None if a command's output ``said``, without frameworks' notices, is the one shown, else both."""
    expected, actual = shown.rstrip("\n"), _NOTICE.sub("", said).rstrip("\n")
    if "any order" in block.marks:
        expected, actual = ("\n".join(sorted(text.splitlines())) for text in (expected, actual))
    if "joined lines" in block.marks:
        expected, actual = (" ".join(text.split()) for text in (expected, actual))
    pattern = re.escape(expected)
    pattern = re.sub(r"(?m)^\\\.\\\.\\\.(\\\n|\n|$)", r"(?:.*\\n)?", pattern)
    pattern = pattern.replace(r"\.\.\.", ".*")
    for word in block.marks.get("varies", "").split():
        pattern = pattern.replace(re.escape(word), ".*")
    if re.fullmatch(pattern, actual + "\n", re.S) or re.fullmatch(pattern, actual, re.S):
        return None
    return f"shown:\n{expected}\n\nsaid:\n{actual}"


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def environment() -> dict[str, str]:
    """That of a person who has just opened a shell in which the package is installed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RINGDANCE_", "HOROVOD_", "OMP_"))}
    kept |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", "COLUMNS": "100"}
    if os.getuid() == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept


def put_files(page: Path, directory: Path) -> None:
    """What the page's commands find in their directory: its own files, and what is in a clone."""
    directory.mkdir(exist_ok=True)
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (directory / path.name).symlink_to(path)
    for block in blocks(page):
        if block.file:
            (directory / block.file).parent.mkdir(parents=True, exist_ok=True)
            (directory / block.file).write_text(block.text)


def skip_if_some_were_missing(page: Path) -> None:
    """To be called at the end, so that pages whose blocks were not all run are listed with the reason."""
    reason = missing(page)
    if reason:
        pytest.skip(reason)
