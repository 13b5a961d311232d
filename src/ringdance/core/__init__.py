"""The engine: submit → agree → batch → exchange → done. Knows no framework and no environment."""
