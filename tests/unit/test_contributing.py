"""The directories, files and functions that CONTRIBUTING.md names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def section(title: str) -> list[list[str]]:
    """Return the cells of each row in a section's table."""
    text = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def defined(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """List the classes, functions, methods and assigned names of a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("row", section("Where is it?"), ids=lambda row: row[0])
def test_answers_name_a_file_and_what_it_defines(row: list[str]) -> None:
    file, names = row[1].strip("`"), re.findall(r"`([\w.]+)`", row[2].partition(" (")[0])
    assert names
    assert set(names) <= set(defined(ast.parse((ROOT / file).read_text())))


def test_there_are_ten_questions() -> None:
    assert len(section("Where is it?")) >= 10


def test_every_entry_of_the_package_has_a_row() -> None:
    named = {name for row in section("Where things are") for name in re.findall(r"`([^`]+)`", row[0])}
    # A directory without sources was a package in an older state of this clone.
    package = ROOT / "src" / "ringdance"
    paths = [path for path in package.iterdir() if path.is_file() or any(path.rglob("*.py"))]
    entries = {path.name for path in paths if not path.name.startswith("__")} - {"py.typed"}
    assert named == entries
    assert len(named) <= 16
