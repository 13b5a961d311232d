"""What moves bytes between ranks. A transport knows no tensor name, no framework and no setting's origin."""
