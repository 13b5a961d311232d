"""State and training loop for elastic training, for all frameworks."""

from ringdance.training.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
