"""Train DeepFM on click logs, on hosts without GPUs."""
