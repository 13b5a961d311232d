"""Read which hosts a scheduler has allocated to this process: one module for each scheduler.

Independent of the launcher, of frameworks and of bindings.
"""
