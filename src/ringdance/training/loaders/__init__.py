"""Loaders for the ranks of a job: of images, of tables, of named pipes, and of the user's own batches."""
