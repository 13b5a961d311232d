"""``hvd.callbacks``."""

from ringdance.keras.callbacks import *  # noqa: F403
from ringdance.keras.callbacks import __all__ as __all__
