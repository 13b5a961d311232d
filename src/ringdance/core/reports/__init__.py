"""Human-readable reports about stalls, deadlocks, mismatches and threads."""
