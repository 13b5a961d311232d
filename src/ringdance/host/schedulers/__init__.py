"""Detect the hosts that a scheduler has allocated to this process. Each scheduler has its own module.

The package does not depend on the launcher, frameworks or bindings.
"""
