"""``ringdance hosts``: copy files to hosts; hosts with an agent on each, for other commands."""
