"""``ringdance doctor`` and the checks before a job starts.

Probes look at a machine and return facts (plain data, so that they can come from another host);
checks are pure functions of facts. Nothing here knows a framework or the engine.
"""
