"""Each module collects facts about one side of a machine: ``collect(usage)`` returns them as plain dicts."""
