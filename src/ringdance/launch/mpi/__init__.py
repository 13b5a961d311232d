"""The MPI library in use, its mpiexec and the options of that."""

from ringdance.launch.mpi.library import FAMILIES, Mpi, family_of, find_mpi

__all__ = ["FAMILIES", "Mpi", "family_of", "find_mpi"]
