"""What all frameworks share."""
