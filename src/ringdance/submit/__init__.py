"""Submit jobs to other systems: Kubernetes manifests, SageMaker training jobs and ranks on Ray."""
