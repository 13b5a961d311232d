"""``ringdance doctor`` and the checks before a job starts.

Probes collect facts about a host as plain dicts, in a process on that host; checks are pure functions of
facts. A module has both for some areas. To add a check: collect what it needs in a function ``NAME_facts``,
which ``PROBES`` of ``probe`` names, add a row to ``CHECKS`` of the module, and a test that breaks the thing.
Nothing here imports a framework or the engine.
"""
