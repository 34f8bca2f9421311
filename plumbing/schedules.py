"""The settings under which the papers compare FedAvg and other methods: rounds, steps, optimizer, images.

fedavg.py and the baselines take theirs from here, a row of a table by the name of its dataset. A paper's own
method has its settings in its own file; test_settings.py holds both equal where they should be.
"""

from __future__ import annotations

from plumbing.run.settings import source

DIGITS = source("ours", rounds=60, lr=0.05, batch_size=32)

# The schedule of FDSE's Table 1, of all its methods. Table 2's accuracies are shares of the target's 10%.
OF_FDSE = (source("text of FDSE, Sec. 5.1 and A7.4", rounds=500, batch_size=50, lr_decay=0.998, clip=10.0)
           | source("text of FDSE, A7.1", image_size=224, split="0.8/0.1/0.1")
           | source("text of FDSE, A7.2 and Table A5", backbone="alexnet_bn")
           | source("numbers of FDSE, Table 2", target_part="test")
           | source("code of FLGo 0.3.29, flgo/utils/fflow.py", momentum=0.0))
FDSE = {
    "officecaltech": (OF_FDSE | source("text of FDSE, Sec. 5.1", epochs=1)
                      | source("code of FDSE dd266a2, config/office/fedavg.yml", lr=0.1, weight_decay=1e-3)),
    "pacs": (OF_FDSE | source("text of FDSE, Sec. 5.1", epochs=5)
             | source("code of FDSE dd266a2, config/pacs/fedavg.yml", lr=0.1, weight_decay=1e-3)),
    "domainnet10": (OF_FDSE | source("text of FDSE, Sec. 5.1", epochs=5)
                    | source("code of FDSE dd266a2, config/domainnet.yml", lr=0.1, weight_decay=1e-3)),
}

# FedSR's Table 1. 500 epochs of a client's 15 batches are 1,500 rounds of 5 steps. FedSR's own FedAvg row
# keeps the momentum over the rounds: fedsr.py --variant fedavg.
OF_MNIST = (source("text of FedSR, Sec. 4.2", protocol="lodo", steps=5, batch_size=64, lr=0.001)
            | source("text of FedSR, Sec. 4.2, and its cited code, DIRT", backbone="smallcnn3")
            | source("ours, of FedSR's 500 epochs", rounds=1500)
            | source("code of FedSR ba8d894, src/methods/base.py", momentum=0.9)
            | source("code of FedSR ba8d894, src/methods/FedSR.py", clip=0.0)
            | source("code of FedSR ba8d894, src/argument.py", weight_decay=5e-4)
            | source("cited code, DIRT 2635178, domain_gen_rotatedmnist", image_size=28, augment="none")
            | source("ours, of FedSR's 90/10", split="0.9/0.05/0.05")
            | source("ours", eval_every=50))
UNIFORM = source("text of FedSR, its objective", average="uniform")
MNIST = {
    "rotatedmnist": OF_MNIST | UNIFORM,
    "rotatedmnist-t10k": OF_MNIST | UNIFORM,
}

# FedSR's Tables 3 and 4, and the datasets that come nearest to them.
OF_FEDSR = (source("text of FedSR, Sec. 4.2, with the ranges of its code", augment="fedsr")
            | source("text of FedSR, Sec. 4.2", normalize="imagenet", protocol="lodo", image_size=224,
                     rounds=1000, steps=5, batch_size=64, lr=0.01, momentum=0.9, weight_decay=5e-4)
            | UNIFORM
            | source("code of FedSR ba8d894, src/methods/base.py", weights="imagenet")
            | source("ours, of FedSR's 90/10", split="0.9/0.05/0.05")
            | source("ours", eval_every=20))
FEDSR = {
    "officehome": OF_FEDSR | source("text of FedSR, Sec. 4.2", backbone="resnet50"),
    "domainnet": OF_FEDSR | source("text of FedSR, Sec. 4.2", backbone="resnet50"),
    "vlcs": OF_FEDSR | source("ours", backbone="resnet18"),  # FedADG's FedAvg: fedadg.py --no-adversarial
    "terrainc": OF_FEDSR | source("ours", backbone="resnet18"),
    "domainnet20": OF_FEDSR | source("ours", backbone="resnet18"),
}

# FedCiR's Table 1: the defaults of the two datasets that only it has, and --variant fedcir.
OF_FEDCIR = (source("text of FedCiR, Sec. 6.1", backbone="resnet18", image_size=128, rounds=300, steps=20,
                    batch_size=32, lr=0.01, momentum=0.9, weight_decay=5e-4)
             | source("ours", protocol="indomain", target_part="all", lr_decay=1.0, clip=0.0))
OF_FEDCIR_AVERAGED = OF_FEDCIR | source("text of FedCiR, its average", average="uniform")
FEDCIR = {
    "officecaltech": OF_FEDCIR_AVERAGED,
    "pacs": OF_FEDCIR_AVERAGED,
    "domainnet10": OF_FEDCIR_AVERAGED,
    # To evaluate Camelyon17's 91,000 validation and test images in each round would be 90% of the run.
    "camelyon17": OF_FEDCIR_AVERAGED | source("ours", eval_every=10),
    "iwildcam": OF_FEDCIR_AVERAGED,
}

# FedSR's row of FedCiR's Table 1.
FEDSR_BY_FEDCIR = (source("text of FedCiR, Sec. 6.1", backbone="resnet18", image_size=128, rounds=300,
                          steps=20, batch_size=32, lr=0.01, momentum=0.9, weight_decay=5e-4)
                   | source("ours", protocol="indomain")
                   | source("text of FedCiR, App. E", alpha_l2r=0.0)
                   | source("ours, as fedcir.py", weights="none", normalize="unit", augment="none",
                            split="0.8/0.1/0.1", keep_momentum=False, eval_every=1))
FEDSR_IN_FEDCIR = {
    "officecaltech": FEDSR_BY_FEDCIR | source("text of FedCiR, App. E", alpha_cmi=1e-6),
    "pacs": FEDSR_BY_FEDCIR | source("text of FedCiR, App. E", alpha_cmi=1e-6),
    "domainnet10": FEDSR_BY_FEDCIR | source("text of FedCiR, App. E", alpha_cmi=5e-7),
    "camelyon17": (FEDSR_BY_FEDCIR | source("text of FedCiR, App. E", alpha_cmi=5e-7)
                   | source("ours", eval_every=10)),
    "iwildcam": FEDSR_BY_FEDCIR | source("text of FedCiR, App. E", alpha_cmi=5e-7),
}
