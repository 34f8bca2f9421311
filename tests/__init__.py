import os

# Two workers on two cores: without it numpy's and scikit-learn's threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
