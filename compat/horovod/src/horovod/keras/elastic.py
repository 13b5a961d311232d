"""``hvd.elastic``: training that continues after an error."""

from ringdance.keras.elastic import *
from ringdance.keras.elastic import __all__ as __all__
