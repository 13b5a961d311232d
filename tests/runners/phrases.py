"""Count phrases that a native engineer would not write: `python tests/runners/phrases.py [-v]`.

Part of `make lint`: it fails above a limit. `-v` prints each place.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
LIMITS = {"that of, those of": 25, "is no, are no": 12, "description that begins in mid-phrase": 60}
# Words with which the description of a parameter cannot begin: "batch_size: of each rank".
_MID_PHRASE = re.compile(
    r"(?:of|see|as|with|without|for|in|by|to|from|at|on|among|between|after|before|until|unless|if|where|when"
    r"|which|that|those|what|whose|how|instead|the same|also|not|only|is|are|was|has|have|does|do|each|give"
    r"|given|once|or|and|more|so|than|then|per|within|under|over|through|about|against|because|whether|while)\b"
)
_ENTRY = re.compile(r"( +)\*{0,2}[A-Za-z_][\w, *`.]*(?:\([^)]*\))?: (.*)")


def phrases(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each place as the kind of its phrase and the line."""
    text = path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        for _ in re.findall(r"\b(?:that|those) of\b", line, re.IGNORECASE):
            yield "that of, those of", f"{path}:{number}: {line.strip()}"
        for _ in re.findall(r"\b(?:is|are) no\b(?! longer)", line, re.IGNORECASE):
            yield "is no, are no", f"{path}:{number}: {line.strip()}"
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds):
            for line in descriptions(ast.get_docstring(node) or ""):
                if _MID_PHRASE.match(line.partition(": ")[2]):
                    yield "description that begins in mid-phrase", f"{path}: {line}"


def descriptions(docstring: str) -> Iterator[str]:
    """Yield the first line of each entry under Args and Attributes."""
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n)*)", docstring, re.MULTILINE):
        entries = [match for match in map(_ENTRY.fullmatch, section.splitlines()) if match]
        for entry in entries:
            if entry[1] == entries[0][1]:
                yield entry[0].strip()


def main() -> int:
    """Print the counts; return 1 if one is above its limit."""
    places = [place for path in sorted(SRC.rglob("*.py")) for place in phrases(path)]
    if "-v" in sys.argv:
        print(*[place for _, place in places], sep="\n")
    failed = False
    for kind, limit in LIMITS.items():
        count = sum(place[0] == kind for place in places)
        failed |= count > limit
        print(f"{kind}: {count}, at most {limit}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
