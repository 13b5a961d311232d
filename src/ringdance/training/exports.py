"""The names that every binding exports, to be imported with a star."""

from ringdance.errors import CollectiveError as CollectiveError
from ringdance.training.basics import *
from ringdance.training.collectives import (
    Adasum as Adasum,
)
from ringdance.training.collectives import (
    Average as Average,
)
from ringdance.training.collectives import (
    Max as Max,
)
from ringdance.training.collectives import (
    Min as Min,
)
from ringdance.training.collectives import (
    Product as Product,
)
from ringdance.training.collectives import (
    Sum as Sum,
)
from ringdance.training.objects import (
    allgather_object as allgather_object,
)
from ringdance.training.objects import (
    broadcast_object as broadcast_object,
)
from ringdance.training.process_sets import *
