"""What the launcher's parts share."""
