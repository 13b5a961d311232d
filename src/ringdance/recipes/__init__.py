"""Training jobs that come with the package, to copy and change."""
