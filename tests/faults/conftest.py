"""Let the fault tests import ``processes``, their helpers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
