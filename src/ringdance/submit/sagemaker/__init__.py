"""Training jobs on Amazon SageMaker. Requires boto3, but not the SageMaker SDK."""

from ringdance.submit.sagemaker.estimator import Estimator, worker_channel
from ringdance.submit.sagemaker.request import Input

__all__ = ["Estimator", "Input", "worker_channel"]
