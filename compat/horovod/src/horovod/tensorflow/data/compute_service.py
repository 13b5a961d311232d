"""A tf.data service beside the training."""

from ringdance.tensorflow.data.service import TfDataServiceConfig, send_to_data_service, tf_data_service

__all__ = ["TfDataServiceConfig", "send_to_data_service", "tf_data_service"]
