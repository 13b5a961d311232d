"""Moves bytes between ranks. A transport knows no tensor names, no framework and no setting's origin."""
