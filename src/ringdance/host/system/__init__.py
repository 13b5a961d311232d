"""This host: its processes, hardware and networks, and the cleanup after a job. Standard library only."""
