"""Loaders that divide images and table rows among ranks, and the measurement of any loader."""
