"""``hvd.callbacks``."""

from ringdance.keras.callbacks import *
from ringdance.keras.callbacks import __all__ as __all__
