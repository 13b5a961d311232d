"""Reports for people: stalls, deadlocks, mismatches, threads, the flight recorder."""
