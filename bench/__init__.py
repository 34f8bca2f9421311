"""The benchmark: what a round costs, what a method adds to it, what the views of an image cost."""
