"""Parts that all frameworks share."""
