"""Jobs on Kubernetes for the MPI operator (MPIJob) or Kubeflow Trainer (TrainJob)."""
