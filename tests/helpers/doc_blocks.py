"""Find and classify the code blocks of README.md and docs/, and say what a test must do with each.

A block's language decides how it is tested:

- ``python``: the blocks of a page, in order, form one script that runs on two ranks.
- ``console``: each ``$ command`` runs in the page's directory and must print the lines that follow it.
  Output lines that consist of ``...`` stand for any text.
- ``sh``: each line runs as a command in the page's directory.
- ``toml``, ``yaml``, ``json``: the block is parsed.
- ``{directive}``: content that Sphinx generates. Building the pages checks it.

An HTML comment before a block, invisible to readers, adds instructions (several are separated by ``;``):

- ``<!-- test: file NAME -->``: write it to this file in the page's directory, do not run it.
- ``<!-- test: exit N -->``: expected exit code of the commands (0 by default).
- ``<!-- test: varies WORD WORD -->``: these words of the output are examples.
- ``<!-- test: any order -->``: the lines of the output may come in any order.
- ``<!-- test: joined lines -->``: the output's line breaks are only for readability.
- ``<!-- test: needs MODULE MODULE -->``: run it only if these modules can be imported.
- ``<!-- test: slow -->``: only `make test-all` runs these commands.
- ``<!-- test: in PATH -->``: the test file at this path runs it.
- ``<!-- test: shared job -->``: the scripts run in one job of two ranks, together with other pages' scripts.
- ``<!-- test: drawing -->``: the block is not code.
- ``<!-- test: not run: REASON -->``: do not run it.

A comment ``<!-- test: hidden`` followed by lines of code is a Python block that readers do not see.
With ``hidden file NAME``, it is a file.
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
# What TensorFlow and XLA write to stderr depends on the processor and the machine, so it is removed.
_NOTICE = re.compile(
    r"^(?:\[\d+\](?:<\w+>:| ))?(?:WARNING: All log messages before absl::InitializeLog|[IWE]0000 00:00:"
    r"|\d{4}-\d\d-\d\d \S+: [IWE] (?:tensorflow|external)/|To enable the following instructions:).*\n?",
    re.M,
)
RUN = ("python", "console", "sh")
PARSED = ("toml", "yaml", "json")


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        page: File that contains the block.
        line: Number of its first line of text.
        language: Word after the opening fence.
        text: Lines of the block.
        marks: Instructions from the comment before the block, by kind.
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
        """True if the block runs as part of its page wherever the modules it needs are installed."""
        return self.language in RUN and not {"not run:", "in", "drawing", "shared job"} & self.marks.keys()

    @property
    def missing(self) -> list[str]:
        """Modules that the block needs but that cannot be imported here."""
        return [name for name in self.marks.get("needs", "").split() if not importlib.util.find_spec(name)]

    @property
    def runs_here(self) -> bool:
        """True if the block is run as part of its page here."""
        return self.belongs_to_page and not self.missing

    def commands(self) -> list[tuple[str, str]]:
        """Return the commands, each with the output that the page shows for it."""
        if self.language == "sh":
            return [(line, "") for line in self.text.splitlines() if line and not line.startswith("#")]
        commands: list[tuple[str, str]] = []
        text = re.sub(r" \\\n +", " ", self.text)  # long commands are continued with a backslash
        for line in text.splitlines(keepends=True):
            if line.startswith("$ "):
                commands.append((line[2:].rstrip("\n"), ""))
            else:
                command, output = commands.pop()
                commands.append((command, output + line))
        return commands


def _marks(text: str) -> dict[str, str]:
    marks = {}
    for mark in filter(None, (part.strip() for part in text.split(";"))):
        kind = next((known for known in _KNOWN if mark == known or mark.startswith(known + " ")), None)
        if kind is None:
            raise ValueError(f"unknown mark {mark!r}")
        marks[kind] = mark.removeprefix(kind).strip()
    return marks


def missing(page: Path) -> str:
    """Return why blocks of a page cannot run here, or an empty string if all of them can."""
    names = {name for block in blocks(page) if block.belongs_to_page for name in block.missing}
    return f"ran without the blocks that need {', '.join(sorted(names))}" if names else ""


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page in order, including hidden ones.

    Raises:
        ValueError: If a mark is unknown or is not followed by a block.
    """
    text = page.read_text()
    result: list[Block] = []
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
                result.append(Block(page, line, "python", mark["text"], marks))
            position = mark.end()
        elif fence:
            line = text.count("\n", 0, fence.start("text")) + 1
            result.append(Block(page, line, fence["language"], textwrap.dedent(fence["text"]), ahead))
            ahead, position = {}, fence.end()
        else:
            break
    if ahead:
        raise ValueError(f"{page}: {ahead} is not followed by a block")
    return result


def script(page: Path) -> str:
    """Join the page's Python blocks into one script. Line numbers match those in the page."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and block.runs_here and block.file is None:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines)


def difference(block: Block, shown: str, said: str) -> str | None:
    """Return None if the output ``said``, without frameworks' notices, matches ``shown``, otherwise both."""
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
    """Return the environment of a user who has just opened a shell with the package installed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RINGDANCE_", "HOROVOD_", "OMP_"))}
    kept |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}", "COLUMNS": "100"}
    if os.getuid() == 0:
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept


def put_files(page: Path, directory: Path) -> None:
    """Create what the page's commands expect in their directory: its own files, and links into the clone."""
    directory.mkdir(exist_ok=True)
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (directory / path.name).symlink_to(path)
    for block in blocks(page):
        if block.file:
            (directory / block.file).parent.mkdir(parents=True, exist_ok=True)
            (directory / block.file).write_text(block.text)


def skip_if_some_were_missing(page: Path) -> None:
    """Skip if some blocks of the page did not run. Call this last: pytest then lists the reason."""
    reason = missing(page)
    if reason:
        pytest.skip(reason)
