"""``ringdance data``: prepare data sets of images, check them, describe them."""
