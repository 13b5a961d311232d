"""Training jobs that come with the package, to be copied and changed."""
