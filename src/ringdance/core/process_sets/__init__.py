"""Process sets inside the engine: their registry, and how the members of one agree on what to execute.

``registry`` has all sets, ``state`` one set's rounds of agreement, ``pending`` its requests in flight and
``executor`` what follows from a round. (The user's API is ``training/process_sets.py``.)
"""
