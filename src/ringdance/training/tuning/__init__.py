"""Tune a job while it trains: the settings that autotuning can change, and the search for their values."""
