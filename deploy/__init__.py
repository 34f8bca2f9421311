"""Methods on separate machines."""
