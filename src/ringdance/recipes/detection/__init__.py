"""Faster R-CNN and Mask R-CNN on COCO with torchvision, from 100 photographs on a laptop to 24 V100."""
