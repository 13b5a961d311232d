"""Move bytes between ranks. Transports do not know tensor names, frameworks or the origin of settings."""
