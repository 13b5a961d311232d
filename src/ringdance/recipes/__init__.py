"""Complete training scripts for users to run, or to copy and change."""
