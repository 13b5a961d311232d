"""DeepFM on logs of clicks, for CPU hosts: training and scoring."""
