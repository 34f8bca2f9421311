"""What can be measured of finished runs: costs, other flags at test time, confusions.

    python -m reproduce.measures cost runs/fedcir-... --accuracy 0.6           # FedCiR, Sec. 6.5, Table 3
    python -m reproduce.measures adaptation runs/fdse-...                      # FDSE, Algorithm 3, Table 2
    python -m reproduce.measures confusion runs/fdse-... --out confusion.png   # true and predicted

A run is its output folder. Server and clients are put together again (finished.py), so that all measures look
at exactly the networks that were tested. Nothing here trains or changes a run.
"""
