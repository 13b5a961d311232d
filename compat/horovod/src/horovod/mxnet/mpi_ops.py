"""Collective functions and related helpers."""

from horovod.common.basics import HorovodBasics
from ringdance.mxnet import *
from ringdance.mxnet import __all__ as __all__

_basics = HorovodBasics(__file__)
