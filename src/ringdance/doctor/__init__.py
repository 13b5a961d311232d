"""``ringdance doctor`` and the checks before a job starts.

Probes collect facts about a host as plain dicts, in a process on that host; checks are pure functions of
facts. To add a check: collect what it needs in a module of ``probes``, add a row to ``CHECKS`` of a module of
``checks``, and a test that breaks the thing. Nothing here imports a framework or the engine.
"""
