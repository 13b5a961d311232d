"""The names that every binding exports, to be imported with a star."""

from ringdance.core.request import ReduceOp as _ReduceOp
from ringdance.errors import CollectiveError as CollectiveError
from ringdance.training.basics import *
from ringdance.training.checkpoints import *
from ringdance.training.embedding import *
from ringdance.training.evaluation import *
from ringdance.training.loaders.input_check import *
from ringdance.training.objects import *
from ringdance.training.process_sets import *
from ringdance.training.schedules import *

Average = int(_ReduceOp.AVERAGE)
Sum = int(_ReduceOp.SUM)
Adasum = int(_ReduceOp.ADASUM)
Min = int(_ReduceOp.MIN)
Max = int(_ReduceOp.MAX)
Product = int(_ReduceOp.PRODUCT)
