"""Training that continues after an error."""

from ringdance.tensorflow.elastic import *
from ringdance.tensorflow.elastic import __all__ as __all__
