"""Move bytes between ranks. Transports know nothing about tensor names, frameworks or sources of settings."""
