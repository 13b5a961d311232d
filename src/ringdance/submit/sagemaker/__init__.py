"""Training jobs on Amazon SageMaker. Needs only boto3."""

from ringdance.submit.sagemaker.estimator import Estimator, worker_channel
from ringdance.submit.sagemaker.request import Input

__all__ = ["Estimator", "Input", "worker_channel"]
