"""``ringdance bench``: measure what limits training, and how training scales with the number of ranks."""
