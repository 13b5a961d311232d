"""Faster R-CNN and Mask R-CNN on COCO with torchvision, from 100 images on a laptop to 24 V100 GPUs."""
