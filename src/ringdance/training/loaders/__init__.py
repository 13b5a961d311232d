"""Loaders for the ranks of a job: of images, of tables, and of the user's own batches."""
