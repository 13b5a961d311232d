"""Seeded random programs of collectives, and the right results by NumPy."""
