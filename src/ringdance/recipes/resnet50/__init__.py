"""ResNet-50 on ImageNet, from synthetic data on a laptop to hundreds of devices."""
