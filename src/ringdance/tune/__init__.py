"""Tune a training and predict it: what ``ringdance bench train`` and its neighbours are made of."""
