"""Read and summarize a job's timelines and metrics, and determine what limits the job."""
