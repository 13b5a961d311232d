"""Hand a job to a scheduler: Slurm batch files, Kubernetes manifests, SageMaker jobs, EC2 host files."""
