"""DeepFM on logs of clicks, for CPU hosts: training, scoring, and strategies of training side by side."""
