"""Subsets of the ranks."""

from ringdance.training.process_sets import *
from ringdance.training.process_sets import __all__ as __all__
