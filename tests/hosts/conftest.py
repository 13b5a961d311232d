"""Three simulated hosts for all tests here, or the reason why there are none."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosts import Hosts, why_not


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[Hosts]:
    if why_not():
        pytest.skip(f"simulated hosts: {why_not()}")
    with tempfile.TemporaryDirectory(prefix="rdh-") as directory:
        hosts = Hosts(Path(directory) / "net", 3)
        yield hosts
        hosts.down()
