"""The monitor: a process on each host that reads the ranks' rings while they run."""
