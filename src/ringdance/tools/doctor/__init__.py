"""``ringdance doctor``, and the checks that run before a job starts.

Probes run in a process on each host and collect facts as plain dicts. Checks are pure functions of these
facts. Each module contains the probes and checks for one or more areas. To add a check, collect its facts in
a function ``NAME_facts`` and list it in ``PROBES`` in ``probe.py``. Then add a row to the module's
``CHECKS`` and a test that actually causes the problem. Nothing here imports a framework or the engine.
"""
