"""``ringdance doctor`` and the checks before a job starts.

Probes collect facts about a host as plain dicts, in a process on that host. Checks are pure functions of
facts. Each module has the probes and checks of some areas. To add a check, collect its facts in a function
``NAME_facts`` that is listed in ``PROBES`` in ``probe.py``, add a row to the module's ``CHECKS``, and write a
test that really breaks what is checked. Nothing here imports a framework or the engine.
"""
