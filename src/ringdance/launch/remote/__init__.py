"""Reach other hosts of a job: ssh or srun, and the agents at the other end."""
