"""The benchmark: what a round costs, beside bare arithmetic and beside other frameworks."""
