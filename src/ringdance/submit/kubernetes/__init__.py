"""Kubernetes jobs for the MPI operator (MPIJob) or Kubeflow Trainer (TrainJob)."""
