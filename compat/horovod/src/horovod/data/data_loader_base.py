"""Loaders that work ahead."""

from ringdance.training.loaders.ahead import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
