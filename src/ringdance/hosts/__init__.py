"""``ringdance hosts``: look at hosts, run commands on them, copy to them, end jobs, add their ssh keys."""
