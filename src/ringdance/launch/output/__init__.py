"""Output of ranks and mpiexec: to the terminal, to files, merged."""
