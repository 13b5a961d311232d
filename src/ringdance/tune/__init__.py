"""Tune training and predict its speed: the commands ``bench train``, ``plan`` and ``tune``, and autotune."""
