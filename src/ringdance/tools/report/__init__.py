"""Read what a job has written: timelines and figures; sum them up and say what limits the job."""
