"""The machinery under common.py: settings, the run folder, processes, files, archives, augmentation."""
