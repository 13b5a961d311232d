"""``ringdance data``: prepare data sets of images and click logs, check them, and describe them."""
