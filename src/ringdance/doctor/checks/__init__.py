"""The checks, by area. Each is a pure function of facts; see ``ringdance.doctor.registry``."""
