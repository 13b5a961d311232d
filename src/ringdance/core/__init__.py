"""The engine: submit → agree → batch → exchange → done. Settings are passed to it."""
