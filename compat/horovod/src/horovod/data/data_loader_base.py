"""Loaders that work ahead."""

from ringdance.training.loaders import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
