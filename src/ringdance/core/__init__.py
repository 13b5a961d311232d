"""The engine: submit → agree → batch → exchange → done. Independent of frameworks and the environment."""
