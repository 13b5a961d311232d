"""Run the ``ringdance`` command as ``python -m ringdance``."""

from __future__ import annotations

import sys

from ringdance.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
