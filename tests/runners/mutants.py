"""Mutate one operator, constant or condition at random, many times, and report which mutants the tests catch.

    python tests/runners/mutants.py --count 100 --seed 1 --output mutants.json   hours; repeat to continue
    python tests/runners/mutants.py --show mutants.json                          list survivors

Each mutant changes a file of src/ringdance in place and restores it afterwards, so the clone must not have
uncommitted changes there. The part's unit tests run first, then the jobs that cover the part, until one
fails. A mutant that none of them detects has survived.
Not mutated: docstrings, annotations, messages, time limits (names that end in _S, floats), and comparisons
where only the boundary would change (< for <=).
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "ringdance"
JOBS = {
    "core": ("unit/engine", "ranks/numpy-2", "ranks/numpy-3", "ranks/torch-2", "faults"),
    "training": ("ranks/numpy-2", "unit/engine", "ranks/torch-2", "ranks/tensorflow-2", "dropin/scripts"),
    "torch": ("ranks/torch-2", "unit/engine", "dropin/launching", "dropin/torch-3"),
    "launch": ("unit/tools", "dropin/launching", "dropin/commands", "faults"),
}
"""The jobs of `make test` that cover each part, fastest first."""
COMPARED = {
    ast.Lt: ">", ast.LtE: ">", ast.Gt: "<", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+"}


class Mutant(NamedTuple):
    """A replacement for the text between two offsets in a file."""

    file: str
    line: int
    begin: int
    end: int
    text: str
    old: str


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    text = path.read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    data, name = text.encode(), str(path.relative_to(ROOT))

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno
        assert node.end_col_offset is not None
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def made(line: int, begin: int, end: int, new: str) -> Mutant:
        return Mutant(name, line, begin, end, new, data[begin:end].decode())

    def between(left: ast.expr, right: ast.expr, new: str) -> Mutant | None:
        begin, end = span(left)[1], span(right)[0]
        if set(data[begin:end].decode()) & set("()#\n"):
            return None
        return made(left.lineno, begin, end, f" {new} ")

    def visit(node: ast.AST) -> Iterator[Mutant | None]:
        if isinstance(node, ast.keyword) and node.arg == "strict":  # zip()'s checks only catch defects
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and (new := COMPARED.get(type(node.ops[0]))):
            yield between(node.left, node.comparators[0], new)
        elif isinstance(node, ast.BinOp) and (new := COMPUTED.get(type(node.op))):
            if not any(isinstance(operand, (ast.Constant, ast.JoinedStr)) and not isinstance(
                getattr(operand, "value", ""), int) for operand in (node.left, node.right)):  # fmt: skip
                yield between(node.left, node.right, new)
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            yield between(*node.values, "or" if isinstance(node.op, ast.And) else "and")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield made(node.lineno, span(node)[0], span(node.operand)[0], "")
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)) and isinstance(node.test, (ast.Name, ast.Call)):
            begin, end = span(node.test)
            yield made(node.lineno, begin, end, f"(not {data[begin:end].decode()})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            new = str(not node.value) if type(node.value) is bool else str(node.value + 1)
            yield made(node.lineno, *span(node), new)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(node, (ast.JoinedStr, ast.Raise)) or _is_of_time(node):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    yield from filter(None, visit(ast.parse(text)))


def _is_of_time(node: ast.AST) -> bool:
    targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
    return any(isinstance(target, ast.Name) and target.id.endswith("_S") for target in targets)


def caught_by(mutant: Mutant) -> str:
    """Return the first job that fails with a mutant, or "" if it survives."""
    path = ROOT / mutant.file
    data = path.read_bytes()
    changed = data[: mutant.begin] + mutant.text.encode() + data[mutant.end :]
    try:
        compile(changed, mutant.file, "exec")
        path.write_bytes(changed)
        part = path.relative_to(SOURCE).parts[0]
        units = f"tests/unit/{part}"
        commands = {units: ["-m", "pytest", "-x", "-q", "-m", "not slow", units]}
        commands |= {job: ["tests/runners/run.py", "-x", job] for job in JOBS[part]}
        for name, words in commands.items():
            command = [sys.executable, *words]
            if subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode:
                return name
    finally:
        path.write_bytes(data)
    return ""


def main() -> None:
    """Draw mutants, run the tests on each, and record what caught it."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--count", type=int, default=100, metavar="N", help="number of mutants; default: 100")
    add("--seed", type=int, default=0)
    add("--parts", nargs="+", default=list(JOBS), choices=list(JOBS), metavar="PART", help=" ".join(JOBS))
    add("--output", type=Path, default=Path("mutants.json"), metavar="FILE", help="default: mutants.json")
    add("--show", type=Path, metavar="FILE", help="only print the survivors")
    arguments = parser.parse_args()
    if arguments.show:
        rows = json.loads(arguments.show.read_text())
        show(rows)
        return
    if subprocess.run(["git", "diff", "--quiet", "--", "src"], cwd=ROOT, check=False).returncode:
        sys.exit("src has uncommitted changes. Commit them first.")
    paths = [path for part in arguments.parts for path in sorted((SOURCE / part).rglob("*.py"))]
    every = [mutant for path in paths for mutant in mutants(path)]
    drawn = random.Random(arguments.seed).sample(every, min(arguments.count, len(every)))
    rows = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
    for number, mutant in enumerate(drawn):
        if number < len(rows):
            continue
        rows.append({**mutant._asdict(), "caught": caught_by(mutant)})
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{number + 1}: {mutant.file}:{mutant.line} {rows[-1]['caught'] or 'SURVIVED'}", flush=True)
    show(rows)


def show(rows: list[dict[str, str]]) -> None:
    """Print the mutants that survived, and how many were caught."""
    for row in rows:
        if not row["caught"]:
            print(f"{row['file']}:{row['line']}: {row['old']!r} -> {row['text']!r}")
    print(f"caught: {sum(bool(row['caught']) for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
