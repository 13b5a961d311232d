"""Readable reports: stalls, deadlocks, mismatches, threads."""
