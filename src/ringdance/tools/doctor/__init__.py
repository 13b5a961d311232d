"""``ringdance doctor``, and the checks that run before a job starts.

Probes run in a separate process on each host and collect facts as plain dicts. Checks are pure functions of
these facts. Most modules contain the probes and checks for one or more areas. To add a check, collect its
facts in a function ``NAME_facts``, and list this probe in ``PROBES`` in ``probe.py``. Then add a row to
``CHECKS`` in the module that defines the function, and a test that provokes the problem. This package imports
neither a framework nor the engine.
"""
