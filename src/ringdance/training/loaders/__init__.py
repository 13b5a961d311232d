"""Loaders for the ranks of a job: images, tables, and the user's own batches."""
