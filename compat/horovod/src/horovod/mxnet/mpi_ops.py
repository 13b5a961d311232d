"""The collective functions, and what belongs to them."""

from horovod.common.basics import HorovodBasics
from ringdance.mxnet import *
from ringdance.mxnet import __all__ as __all__

_basics = HorovodBasics(__file__)
