"""``ringdance hosts``: copy files to hosts. Other commands also use the sets of hosts defined here."""
