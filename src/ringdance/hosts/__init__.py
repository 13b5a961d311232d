"""``ringdance hosts``: look at hosts, copy files to them."""
