"""Training jobs on Amazon SageMaker, by boto3 alone."""

from ringdance.submit.sagemaker.estimator import Estimator, worker_channel
from ringdance.submit.sagemaker.request import Input

__all__ = ["Estimator", "Input", "worker_channel"]
