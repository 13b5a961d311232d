"""``ringdance bench`` and ``ringdance tune``: find what limits a script, and the best settings for CPUs."""
