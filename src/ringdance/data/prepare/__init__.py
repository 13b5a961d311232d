"""``ringdance data``: prepare, check and describe data sets of images and click logs."""
