"""Three simulated hosts for all tests here, or the reason for skipping them. Most tests here are slow."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosts import Hosts, remove_all, why_not

IN_MAKE_TEST = {
    "test_ranks_are_where_the_plan_says",
    "test_training_on_numpy_arrays",
    "test_horovodrun",
    "test_hosts_that_cannot_be_used",
    "test_figures_of_all_hosts_come_to_the_launcher[False]",
    "test_the_leaders_link_carries_it_once",
    "test_who_died[kill-h1:2,h2:1,h3:1-0]",
    "test_who_died[exit 0-h1:1,h2:2,h3:3-1]",
    "test_harm[0-kill_agent-True]",
    "test_harm[0-unplug-False]",
    "test_ranks_have_time_to_save[True-3]",
    "test_a_host_without_shared_memory",
}


def pytest_configure() -> None:
    """Remove the hosts if SIGTERM ends the run, and add system administration programs to PATH."""
    signal.signal(signal.SIGTERM, remove_all)
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin{os.pathsep}/sbin"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not {item.name, item.name.partition("[")[0]} & IN_MAKE_TEST:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[Hosts]:
    if why_not():
        pytest.skip(f"simulated hosts: {why_not()}")
    with tempfile.TemporaryDirectory(prefix="rdh-") as directory:
        hosts = Hosts(Path(directory) / "net", 3)
        yield hosts
        hosts.down()
