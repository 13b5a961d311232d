"""DeepFM on click logs, for CPU hosts: training and scoring."""
