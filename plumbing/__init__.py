"""The machinery under common.py: settings, the run folder, devices, files, archives, augmentation."""
