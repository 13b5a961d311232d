"""Process sets inside the engine: their registry, and how the members of a set agree on what to execute.

``registry`` holds all sets, ``state`` runs a set's rounds of agreement, ``pending`` holds its requests in
flight, and ``executor`` carries out the result of a round. The user API is in ``training/process_sets.py``.
"""
