"""Parts that the launcher's modules share."""
