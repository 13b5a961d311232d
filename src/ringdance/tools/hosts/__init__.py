"""``ringdance hosts``: copy files to hosts. Other commands also use this package's ``HostSet``."""
