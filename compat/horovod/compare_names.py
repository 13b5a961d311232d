"""Compare Horovod's public names, as listed in names.toml, with ours, and write the table for the docs.

``python compat/horovod/compare_names.py`` prints each difference that the list does not explain, and reports
whether docs/reference/horovod-names.md is out of date. The exit code is 1 if there is anything to report.
With ``--write`` it writes that page.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "names.toml"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "horovod-names.md"
KINDS = {
    "functions", "classes", "exceptions", "values", "objects", "also_in", "differences", "signatures",
    "needs",
}  # fmt: skip
Section = dict[str, Any]


def load(path: Path = DATA) -> tuple[dict[str, Section], list[str]]:
    """Return the sections by module, and the modules that must not be importable."""
    data = tomllib.loads(path.read_text())
    absent = data.pop("absent")
    # The table [horovod.functions] is nested, but ["horovod.torch".functions] is not.
    for module, section in data.items():
        unknown = set(section) - KINDS
        if unknown:
            raise ValueError(f"{path.name}: [{module}] has {sorted(unknown)}; known are {sorted(KINDS)}.")
    return data, absent


def find(module: str, name: str) -> Any:
    """Return the object that a dotted name refers to in a module. Raises AttributeError or ImportError."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def declared(parameters: str, module: str) -> list[inspect.Parameter]:
    """Return the parameters in a list like a def statement's. Defaults are evaluated in the module."""
    names = dict(vars(importlib.import_module(module)))
    return list(inspect.signature(eval(f"(lambda {parameters}: None)", names)).parameters.values())


def unlike(wanted: list[inspect.Parameter], found: list[inspect.Parameter]) -> str:
    """Return the difference between two lists of parameters, in words, or an empty string."""
    names = [one.name for one in wanted], [one.name for one in found]
    if names[0] != names[1]:
        return f"the parameters are ({', '.join(names[1])}), expected ({', '.join(names[0])})"
    for one, other in zip(wanted, found, strict=True):
        if one.kind is not other.kind:
            return f"{one.name} is {other.kind.description}, expected {one.kind.description}"
        if type(one.default) is not type(other.default) or one.default != other.default:
            return f"the default of {one.name} is {other.default!r}, expected {one.default!r}"
    return ""


def _signature(section: Section, module: str, name: str, parameters: str, kind: str) -> str:
    found = find(module, name)
    if kind == "class" and "." not in name and not inspect.isclass(found):
        return "is not a class"
    if kind == "function" and (inspect.isclass(found) or not callable(found)):
        return "is not a function"
    parameters = section.get("signatures", {}).get(name, parameters)
    return unlike(declared(parameters, module), list(inspect.signature(found).parameters.values()))


def _value(module: str, name: str, wanted: Any) -> str:
    found = find(module, name)
    same = type(found) is type(wanted) and found == wanted
    return "" if same else f"is {found!r}, expected {wanted!r}"


def _bases(module: str, name: str, wanted: list[str]) -> str:
    known = {base.__name__ for base in find(module, name).__mro__}
    missing = [base for base in wanted if base not in known]
    return f"is no subclass of {', '.join(missing)}" if missing else ""


def _instance(module: str, name: str, wanted: str) -> str:
    known = [base.__name__ for base in type(find(module, name)).__mro__]
    return "" if wanted in known else f"is a {known[0]}, expected a {wanted}"


def _same(module: str, name: str, other: str) -> str:
    return "" if find(other, name) is find(module, name) else f"is not the one of {module}"


def _checks(module: str, section: Section) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each fact's name, and a function that returns what is wrong with the fact."""
    for kind, word in (("functions", "function"), ("classes", "class")):
        for name, parameters in section.get(kind, {}).items():
            yield f"{module}.{name}", partial(_signature, section, module, name, parameters, word)
    for kind, check in (("values", _value), ("exceptions", _bases), ("objects", _instance)):
        for name, wanted in section.get(kind, {}).items():
            yield f"{module}.{name}", partial(check, module, name, wanted)
    for other, names in section.get("also_in", {}).items():
        for name in names:
            yield f"{other}.{name}", partial(_same, module, name, other)


def here(section: Section) -> bool:
    """Return True if the framework that a module needs is installed."""
    needed = section.get("needs")
    return needed is None or importlib.util.find_spec(needed) is not None


def compare(data: dict[str, Section], absent: list[str]) -> list[str]:
    """Return one line for each difference that is not explained."""
    problems = []
    for module, section in data.items():
        if not here(section):
            continue
        for about, check in _checks(module, section):
            try:
                wrong = check()
            except (AttributeError, ImportError) as error:
                wrong = f"is missing ({error})"
            if wrong:
                problems.append(f"{about} {wrong}")
        explained = section.get("differences", {})
        listed = names_of(section)
        problems += [
            f"{module}.{name} is explained, but not listed" for name in explained if name not in listed
        ]
        problems += [
            f"{module}.{name} has another signature here without an explanation"
            for name in section.get("signatures", {}) if name not in explained
        ]
    for module in absent:
        if not advice(module):
            problems.append(f"{module} can be imported, but is listed as absent")
    return problems


def advice(module: str) -> str:
    """Return the message of the error that importing a module raises, or an empty string if there is none."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return ""


def names_of(section: Section) -> dict[str, str]:
    """Return a section's names with their parameters or values as text, in the order of the list."""
    listed: dict[str, str] = {}
    for name, value in section.get("values", {}).items():
        listed[name] = f" = {value}"
    for name in section.get("objects", {}):
        listed[name] = ""
    for name in section.get("exceptions", {}):
        listed[name] = ""
    for kind in ("functions", "classes"):
        for name, parameters in section.get(kind, {}).items():
            listed[name] = f"({' '.join(parameters.split())})"
    return listed


def page(data: dict[str, Section], absent: list[str]) -> str:
    """Return the page for the documentation."""
    lines = [
        "# Horovod's names",
        "",
        "This page lists the public names and signatures of Horovod 0.28.1 that scripts rely on. If",
        "Ringdance differs from Horovod, the last column says how. An empty cell means that there is no",
        "difference. A test compares the list with the code: the names, order, kinds and defaults of",
        "parameters, the values of constants, and the base classes.",
    ]
    for module, section in data.items():
        lines += ["", f"## {module}", "", "| name | difference in Ringdance |", "| --- | --- |"]
        explained = section.get("differences", {})
        for name, parameters in names_of(section).items():
            told = " ".join(explained.get(name, "").split())
            own = section.get("signatures", {}).get(name)
            if own:
                told = f"`({' '.join(own.split())})`. {told}"
            lines.append(f"| `{name}{parameters}` | {told} |")
        for other, names in section.get("also_in", {}).items():
            shown = ", ".join(f"`{name}`" for name in names)
            lines += ["", f"Also in `{other}`: {shown}."]
    lines += ["", "## Missing modules", "", "Importing any of these modules raises an ImportError.", ""]
    lines += [f"- `{module}`: {advice(module).partition(': ')[2]}" for module in absent]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare, and write the page if asked to."""
    data, absent = load()
    problems = compare(data, absent)
    text = page(data, absent)
    if sys.argv[1:] == ["--write"]:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        problems.append(f"{PAGE.name} is not current: run this with --write")
    left = [module for module, section in data.items() if not here(section)]
    if left:
        print(f"Not compared, as the framework is not installed: {', '.join(left)}.")
    agree = sum(len(names_of(section)) for section in data.values() if here(section))
    print("\n".join(problems) or f"{agree} names agree.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
