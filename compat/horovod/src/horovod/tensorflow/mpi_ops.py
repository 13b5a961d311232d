"""The collective functions, and what belongs to them."""

from horovod.common.basics import HorovodBasics
from ringdance.tensorflow import *
from ringdance.tensorflow import __all__ as __all__

_basics = HorovodBasics(__file__)
