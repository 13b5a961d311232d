"""Remember which jobs have passed with all their tests, for `run.py --resume`, until the sources change."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SOURCES = (
    "src", "compat", "tests", "examples", "benchmarks", "docs", "README.md", "Makefile", "pyproject.toml",
    "constraints.txt",
)  # fmt: skip


def digest(root: Path) -> str:
    """Hash everything in the repository at `root` that can affect the outcome of the tests."""
    total = hashlib.sha256()
    for source in SOURCES:
        place = root / source
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and path.suffix not in (".pyc", ".log") and "_build" not in path.parts:
                total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


class Passed:
    """The jobs that have passed on the current sources, with their last lines. Stored in the file `path`."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root = root
        self._path = path
        self._sources = digest(root)
        kept = json.loads(path.read_text()) if path.exists() else {}
        self.lines: dict[str, str] = kept["jobs"] if kept.get("sources") == self._sources else {}

    def add(self, name: str, line: str) -> None:
        """Record that a job has passed, unless the sources have changed since this object was created."""
        if digest(self._root) != self._sources:
            return
        self.lines[name] = line
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps({"sources": self._sources, "jobs": self.lines}, indent=1) + "\n")
        draft.replace(self._path)
