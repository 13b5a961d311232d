"""Seeded random programs of collectives, and their correct results computed by NumPy."""
