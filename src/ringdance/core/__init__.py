"""The engine, which is independent of frameworks: submit → agree → batch → exchange → done."""
