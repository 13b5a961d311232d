"""Hand a job to a scheduler: Kubernetes manifests, SageMaker jobs, ranks on Ray."""
