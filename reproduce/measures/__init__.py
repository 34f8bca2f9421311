"""What the papers measure of finished runs: representations, distances between domains, risks and costs.

    python -m reproduce.measures tsne runs/fedavg-... runs/fedsr-...           # FedSR, App. C.2, Fig. 1
    python -m reproduce.measures pad runs/fedcir-... runs/fedavg-... --out F   # FedCiR, Sec. 6.4, Fig. 12
    python -m reproduce.measures risk runs/fedcir-... runs/fedavg-...          # FedCiR, Sec. 6.4, Fig. 11
    python -m reproduce.measures cost runs/fedcir-... --accuracy 0.6           # FedCiR, Sec. 6.5, Table 3
    python -m reproduce.measures gradients runs/fedgala-...                    # FedGaLA, Sec. 5.2, Fig. 2(a)
    python -m reproduce.measures adaptation runs/fdse-...                      # FDSE, Algorithm 3, Table 2

A run is its output folder: result.json names the method and its arguments, best.pt and checkpoint.pt hold the
state of server and clients. `federation` (finished.py) puts them together again, so that all measures look
at exactly the networks that were tested. Nothing here trains or changes a run, except that `training_flops`
trains one client for a round to count its work.

Figure or table                     File           Functions
FedSR App. C.2, Fig. 1   t-SNE      tsne.py        draw_pairs
FDSE Fig. 4              t-SNE      tsne.py        draw_together (tsne --source all)
FedCiR Sec. 6.4, Fig. 12 PAD        pad.py         proxy_a_distance, pad_table, draw_pad
FedCiR Sec. 6.4, Fig. 11 risks      risks.py       local_risks, draw_risks
FedCiR Sec. 6.5, Table 3 overhead   overhead.py    flops, training_flops, cost_to_reach
FDSE Alg. 3, Table 2                adaptation.py  accuracy_on_target, tested_with
FDSE Table 4             cost       overhead.py    network_cost
FedGaLA Sec. 5.2, Fig. 2(a)         gradients.py   gradient_pairs, mutual_information, draw_gradients

What a run logs over the rounds (FedGaLA, Figs. 2(b), 3(b), 3(d)) is drawn by reproduce.compare.
"""

from reproduce.measures.finished import federation

__all__ = ["federation"]
