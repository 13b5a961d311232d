"""Output from ranks and mpiexec: show it on the terminal, merge it, and copy it to files."""
