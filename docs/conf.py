"""How Sphinx builds this documentation: `make docs`, into docs/_build."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

from ringdance import __version__

runpy.run_path(str(Path(__file__).parent / "figures" / "make.py"), run_name="__main__")  # draws the figures

project = "Ringdance"
author = "The Ringdance authors"
copyright = "The Ringdance authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_source"]
exclude_patterns = ["_build", "_extensions"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a table may stand directly below a title

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["mxnet"]  # needs another NumPy than the other frameworks
python_maximum_signature_line_length = 90

html_theme = "furo"
html_title = "Ringdance"
html_copy_source = False
html_show_sphinx = False
