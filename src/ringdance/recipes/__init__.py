"""Training jobs that come with the package: one file each, to be copied and changed."""
