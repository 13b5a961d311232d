"""Training that goes on after an error."""

from ringdance.tensorflow.elastic import ObjectState, State, TensorFlowKerasState, TensorFlowState, run

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]
