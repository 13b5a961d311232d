"""Train ResNet-50 and other classifiers on ImageNet, other images or synthetic data."""
