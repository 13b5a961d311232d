"""Output of ranks and mpiexec: shown on the terminal, copied to files, and merged."""
