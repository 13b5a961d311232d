"""The script in README.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_jobs import check_shown_script

import ringdance.torch as hvd

hvd.init()


@pytest.mark.ranks(2)
def test_the_readme(tmp_path: Path) -> None:
    """Other ranks print other lines. dropin/test_docs_commands.py runs it with horovodrun."""
    check_shown_script("README.md", "ringdance run -np 2 python train.py", tmp_path, hvd.rank())
