"""``ringdance bench`` and ``ringdance tune``: measure what limits a script, and find the best settings on CPUs."""
