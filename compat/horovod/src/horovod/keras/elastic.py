"""``hvd.elastic``: training that goes on after an error."""

from ringdance.keras.elastic import *
from ringdance.keras.elastic import __all__ as __all__
