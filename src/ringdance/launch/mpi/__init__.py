"""The MPI library in use, its mpiexec, and mpiexec's options."""

from ringdance.launch.mpi.library import Mpi, family_of, find_mpi

__all__ = ["Mpi", "family_of", "find_mpi"]
