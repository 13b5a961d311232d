"""Print the Grafana dashboard, which docs/grafana/make.py generates."""

from __future__ import annotations

from importlib import resources


def main() -> None:
    """Print the dashboard as JSON."""
    print((resources.files("ringdance.core.monitor") / "dashboard.json").read_text(), end="")


if __name__ == "__main__":
    main()
