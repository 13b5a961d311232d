"""Hosts, the configuration file, and the environment of the ranks."""
