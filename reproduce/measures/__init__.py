"""What the papers measure of finished runs: representations, distances between domains, risks and costs.

    python -m reproduce.measures tsne runs/fedavg-... runs/fedsr-...           # FedSR, App. C.2, Fig. 1
    python -m reproduce.measures pad runs/fedcir-... runs/fedavg-... --out F   # FedCiR, Sec. 6.4, Fig. 12
    python -m reproduce.measures risk runs/fedcir-... runs/fedavg-...          # FedCiR, Sec. 6.4, Fig. 11
    python -m reproduce.measures cost runs/fedcir-... --accuracy 0.6           # FedCiR, Sec. 6.5, Table 3
    python -m reproduce.measures gradients runs/fedgala-...                    # FedGaLA, Sec. 5.2, Fig. 2(a)
    python -m reproduce.measures adaptation runs/fdse-...                      # FDSE, Algorithm 3, Table 2
    python -m reproduce.measures confusion runs/fdse-... --out confusion.png   # true and predicted
    python -m reproduce.measures shares runs/fdse-... --coefficient lambda     # of one term in the gradient

A run is its output folder. Server and clients are put together again (finished.py), so that all measures look
at exactly the networks that were tested. Nothing here trains or changes a run.
"""
