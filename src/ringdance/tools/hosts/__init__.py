"""``ringdance hosts``: copy files to hosts. Also sets of hosts with agents, for other commands."""
