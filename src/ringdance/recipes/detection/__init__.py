"""Train torchvision's Faster R-CNN and Mask R-CNN on COCO, or on other data in COCO's layout."""
