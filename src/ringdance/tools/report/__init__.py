"""Read the timelines and metrics that a job has written, summarize them, and find what limits the job."""
