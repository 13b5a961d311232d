"""The commands, extras and files that README.md names exist."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    texts = [text for name, text in BLOCKS if name == language]
    assert texts, f"README.md has no {language} block"
    return texts


def test_python_blocks_compile():
    for text in blocks("python"):
        compile(text, "README.md", "exec")


def test_shell_commands_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in "".join(blocks("sh")).splitlines():
        for command in line.split("&&"):
            match command.split():
                case ["make", target]:
                    assert target in targets
                case ["ringdance", "run", *words]:
                    options = words[: words.index("python")]
                    arguments = [*options, *(["--dry-run"] if "--dry-run" not in options else []), "true"]
                    ringdance("run", *arguments)
                case ["ringdance", *words]:
                    ringdance(*words)
                case ["pip", "install", *_] | ["git", "clone", *_] | ["cd", _] | ["export", _]:
                    pass
                case words:
                    pytest.fail(f"README.md has a command that no test knows: {' '.join(words)}")


def ringdance(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ringdance", *words], capture_output=True, text=True, timeout=55
    )
    assert done.returncode == 0, f"ringdance {' '.join(words)}: {done.stderr}"


def test_extras_in_the_documentation_are_those_of_the_package():
    import tomllib

    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    page = (ROOT / "docs" / "howto" / "running" / "install.md").read_text()
    table = page.split("| extra |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == extras
    for used in re.findall(r"'\.\[([\w,]+)\]'", README):
        assert set(used.split(",")) <= extras


def test_links_lead_to_files():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    figures = re.findall(r'src(?:set)?="([^"]+)"', README)
    assert figures
    for target in [*targets, *figures]:
        if "://" not in target:
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_figures_are_drawn_by_their_script():
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = dict(module.figures())
    for name in module.README:
        assert name in README
        tracked = (ROOT / "docs" / "figures" / name).read_text()
        assert drawn[name] == tracked, f"{name}: run docs/figures/make.py"
