"""Tune a job while it trains: the settings that autotuning changes, and the search among them."""
