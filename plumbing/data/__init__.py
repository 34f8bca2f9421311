"""From a name of a dataset to images: catalogue, archives, listings, decoding, splits, augmentation."""
