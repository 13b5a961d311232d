"""Reach the other hosts in a job through ssh or srun, and start agents there."""
