"""FedCiR: Eq. (15) where it would overflow, and where FedCiR is FedAvg.

Algorithm 1 is in test_fedcir_wiring.py, the encoder and Eq. (17) are in test_gaussian_encoder.py.
"""


import fedcir

import torch
from torch import tensor

def test_eq15_does_not_overflow():
    """Logits of 1000: the loss is 1000."""
    weight = tensor([[[-1000.0], [0.0]], [[0.0], [1000.0]]])
    loss = fedcir.ensemble_loss(torch.ones(1, 1), tensor([0]), weight, torch.zeros(2, 2))
    assert loss.item() == 1000
