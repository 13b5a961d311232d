"""The engine: submit → agree → batch → exchange → done. Knows no framework, launcher or environment variable."""
