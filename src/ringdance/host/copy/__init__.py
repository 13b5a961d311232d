"""An agent's part in ``ringdance hosts copy``. Standard library only."""
