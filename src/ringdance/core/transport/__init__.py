"""Transports, which move bytes between ranks. Independent of tensors, frameworks and settings."""
