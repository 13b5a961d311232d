"""Where am I, and what did the scheduler give me: hosts and slots from files, options and environments.

Knows no launcher, no framework and no binding: it reads, and says what it has found.
"""
