"""The steps of ``init()``, which ``session`` takes in order."""
