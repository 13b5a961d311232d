"""Background jobs: start, list, attach to and stop them."""
