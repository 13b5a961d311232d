"""Reports for people: stalls, deadlocks, mismatches, threads."""
