"""Commands for what a person does with hosts beside a job."""
