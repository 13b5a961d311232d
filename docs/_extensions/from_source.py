"""Directives whose content is taken from the code when the pages are built, so that it is typed once.

``{settings}``: all settings. ``{horovod-variables}``: what each ``HOROVOD_*`` variable does here.
``{horovodrun-options}``: the same for the options of ``horovodrun``. ``{absent-modules}``: modules of
``horovod`` whose import says what to use instead. ``{tested-versions}``: the rows of
``tests/runners/matrix.toml``. ``{doctor-checks}``: what ``ringdance doctor`` looks at.
``{output-of} COMMAND``: what that command prints.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from ringdance.settings import NO_EFFECT, SETTINGS, show
from ringdance.settings.names import BUILD_NAMES, LAUNCHER_NAMES
from ringdance.tools.cli import main
from ringdance.tools.doctor.examine import CHECKS

Row = tuple[str, ...]


def table(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def plain(text: str) -> str:
    """Text that is not Markdown: ``<r>`` would vanish as a tag."""
    return text.replace("<", "&lt;")


def settings_rows() -> Iterator[Row]:
    """Name in the environment, default, meaning; of the settings that Ringdance itself has."""
    for setting in SETTINGS:
        names = f"`{setting.own}`" + (f"<br>`{setting.legacy}`" if setting.legacy else "")
        yield names, show(setting, setting.default), plain(setting.doc)


def horovod_rows() -> Iterator[Row]:
    """Each ``HOROVOD_*`` variable and its effect; those of the build and of its launchers in one row each."""
    for setting in SETTINGS:
        if setting.legacy:
            own = f" Default: {show(setting, setting.default)}. Also `{setting.own}`."
            yield f"`{setting.legacy}`", plain(setting.doc) + own
    for name, (_, reason) in NO_EFFECT.items():
        yield f"`HOROVOD_{name}`", f"no effect: {reason}"
    launcher = sorted(name for name in LAUNCHER_NAMES if name.startswith("HOROVOD_"))
    yield _joined(launcher), "set by the launcher. Do not set these variables yourself"
    build = "no effect: these variables configure Horovod's build, and Ringdance does not compile anything"
    yield _joined(sorted(BUILD_NAMES)), build


def option_rows() -> Iterator[Row]:
    """The options of ``horovodrun`` with what they do here, as its own help tells it."""
    from horovod.runner.options import _parser

    for group in _parser()._action_groups:
        for action in group._group_actions:
            if action.option_strings:
                yield _joined(action.option_strings), plain((action.help or "").replace("%%", "%"))


def absent_rows() -> Iterator[Row]:
    """Modules of Horovod that are not here, with the advice that importing them gives."""
    import horovod

    for module in sorted(module.name for module in pkgutil.iter_modules(horovod.__path__, "horovod.")):
        try:
            importlib.import_module(module)
        except ImportError as error:
            if error.name == module:
                yield f"`{module}`", plain(str(error).partition(": ")[2])


def tested_rows() -> Iterator[Row]:
    """Versions of Python and of the frameworks that are tested together."""
    matrix = Path(__file__).parents[2] / "tests" / "runners" / "matrix.toml"
    for name, table in tomllib.loads(matrix.read_text()).items():
        if name != "defaults":
            yield tuple(table.get(key, "") for key in ("python", "tensorflow", "keras", "jax", "torch"))


def check_rows() -> Iterator[Row]:
    """The doctor's checks: name, area, severity, description."""
    for check in CHECKS.values():
        yield f"`{check.name}`", check.area, check.severity, plain(check.description)


def _joined(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


class _Table(SphinxDirective):
    """A table made from data."""

    head: ClassVar[Row]
    rows: ClassVar[Any]

    def run(self) -> list[nodes.Node]:
        """Put the table where the directive stands."""
        return self.parse_text_to_nodes(table(self.head, type(self).rows()))


class Settings(_Table):
    """``{settings}``."""

    head = ("environment variable", "default", "meaning")
    rows = staticmethod(settings_rows)


class HorovodVariables(_Table):
    """``{horovod-variables}``."""

    head = ("variable", "effect in Ringdance")
    rows = staticmethod(horovod_rows)


class HorovodrunOptions(_Table):
    """``{horovodrun-options}``."""

    head = ("option", "effect in Ringdance")
    rows = staticmethod(option_rows)


class AbsentModules(_Table):
    """``{absent-modules}``."""

    head = ("module", "use instead")
    rows = staticmethod(absent_rows)


class TestedVersions(_Table):
    """``{tested-versions}``."""

    head = ("Python", "TensorFlow", "Keras", "JAX", "PyTorch")
    rows = staticmethod(tested_rows)


class DoctorChecks(_Table):
    """``{doctor-checks}``."""

    head = ("check", "area", "severity", "description")
    rows = staticmethod(check_rows)


class OutputOf(SphinxDirective):
    """``{output-of} COMMAND``: a command of this package, and what it prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Run it in this process, in an environment without settings."""
        command = self.arguments[0]
        program, *words = shlex.split(command)
        if program != "ringdance":
            raise self.error(f"{command}: not a command of this package")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RINGDANCE_", "HOROVOD_"))}
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            mock.patch.dict(os.environ, kept | {"COLUMNS": "100"}, clear=True),
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        ):  # fmt: skip
            try:
                code = main(words)
            except SystemExit as end:
                code = int(end.code or 0)
        if code:
            raise self.error(f"{command}: exit code {code}: {err.getvalue()}")
        text = f"$ {command}\n{out.getvalue()}"
        return [nodes.literal_block(text, text, language="console")]


def keep_self(app: Sphinx, method: Any, bound: bool) -> None:
    """Give the function of a bound method, such as ``hvd.image_loader``, its ``self`` back.

    To keep defaults as they are written, Sphinx stores the signature of the method in its function.
    """
    signature = getattr(method, "__dict__", {}).get("__signature__")
    if inspect.ismethod(method) and not bound and signature is not None:
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        method.__dict__["__signature__"] = signature.replace(
            parameters=[first, *signature.parameters.values()]
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("settings", Settings)
    app.add_directive("horovod-variables", HorovodVariables)
    app.add_directive("horovodrun-options", HorovodrunOptions)
    app.add_directive("absent-modules", AbsentModules)
    app.add_directive("tested-versions", TestedVersions)
    app.add_directive("doctor-checks", DoctorChecks)
    app.add_directive("output-of", OutputOf)
    app.connect("autodoc-before-process-signature", keep_self)
    return {"parallel_read_safe": True}
