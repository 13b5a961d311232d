"""Start and stop, and this process's place in the job."""

from __future__ import annotations

from ringdance.training import basics, exports, session

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions of every framework's module, as methods. The arguments have no effect."""

    def __init__(self, pkg_path: str, *args: str) -> None:
        pass

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the members of every registered process set, by id."""
        return {number: list(ranks) for number, ranks in session.engine().process_sets().items()}


for _name in basics.__all__:
    setattr(HorovodBasics, _name, staticmethod(getattr(basics, _name)))
for _name in ("Adasum", "Average", "Max", "Min", "Product", "Sum"):
    setattr(HorovodBasics, _name, getattr(exports, _name))
