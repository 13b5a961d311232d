"""Read a job's timelines and metrics, summarize them, and find what limits the job."""
