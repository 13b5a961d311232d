"""The command line of ``ringdance recipes``."""

from __future__ import annotations

import argparse
import ast
import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ringdance.launch import subcommands
from ringdance.launch.spec import CommandError
from ringdance.launch.subcommands import Subcommand

_DESCRIPTION = "List and copy training jobs that come with Ringdance."
_EPILOG = """\
examples:
  ringdance recipes list
  ringdance recipes copy resnet50 job              train_torch.py, train_keras.py and their shared files
  ringdance run -np 2 python job/train_torch.py --preset laptop --synthetic --steps 20
"""
# Recipes, each with a command that tries out a copy of the recipe. {} stands for the copy's directory.
_RECIPES = {
    "resnet50": "ringdance run -np 2 python {}/train_torch.py --preset laptop --synthetic --steps 20",
    "detection": "ringdance run -np 2 python {}/train.py --help",
    "deepfm": "ringdance run -np 2 python {}/train_torch.py --help",
}
_SCORED = ("resnet50", "deepfm")  # recipes that share score.py


def main(argv: Sequence[str]) -> int:
    """Run ``ringdance recipes`` with the arguments ``argv``. Returns the exit code."""
    return subcommands.run("ringdance recipes", _DESCRIPTION, _SUBCOMMANDS, argv, _EPILOG)


def _directory(name: str) -> Path:
    package = importlib.import_module(f"ringdance.recipes.{name}")
    return Path(str(package.__file__)).parent


def _files(name: str) -> list[Path]:
    """Return a recipe's files, training scripts first, and the shared modules that it uses."""
    own = _directory(name)
    files = [path for path in (*own.glob("*.py"), *own.parent.glob("*.py")) if path.name != "__init__.py"]
    if name not in _SCORED:
        files.remove(own.parent / "score.py")
    return sorted(files, key=lambda path: (path.stem.partition("_")[0] != "train", path.name))


def _text(path: Path) -> str:
    """Return a file's text, edited so that a copy of it imports shared modules from its own directory.

    The copy therefore does not change its behavior if a later version of Ringdance changes these modules.
    """
    text = path.read_text(encoding="utf-8").replace("from ringdance.recipes import ", "import ")
    return text.replace("from ringdance.recipes.", "from ")


def _first_line(path: Path) -> str:
    # Parse the module instead of importing it, because the import would load a framework.
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def _list(arguments: argparse.Namespace) -> int:
    for name in _RECIPES:
        print(f"{name}: {_first_line(_directory(name) / '__init__.py')}")
        for path in _files(name):
            print(f"  {path.name:16} {_first_line(path)}")
    return 0


def _copy(arguments: argparse.Namespace) -> int:
    target = Path(arguments.directory or arguments.recipe)
    files = _files(arguments.recipe)
    existing = [path.name for path in files if (target / path.name).exists()]
    if existing and not arguments.force:
        raise CommandError(
            f"{target} already contains {', '.join(existing)}. Nothing was copied. Pass another directory, "
            "or pass --force to overwrite the files."
        )
    target.mkdir(parents=True, exist_ok=True)
    for path in files:
        (target / path.name).write_text(_text(path), encoding="utf-8")
        print(target / path.name)
    print(f"Try: {_RECIPES[arguments.recipe].format(shlex.quote(str(target)))}", file=sys.stderr)
    return 0


def _add_copy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", choices=_RECIPES, metavar="RECIPE", help=f"one of: {', '.join(_RECIPES)}")
    parser.add_argument("directory", metavar="DIR", nargs="?", help="target directory (default: ./RECIPE)")
    parser.add_argument("--force", action="store_true", help="overwrite files with the same names")


_SUBCOMMANDS = {
    "list": Subcommand(_list, "list the recipes and their files", lambda parser: None),
    "copy": Subcommand(_copy, "copy a recipe's files to a directory, to edit and run them", _add_copy),
}
