"""FedGaLA as released (MahdiyarMM/FedGaLA @ 81451db): where its code does not do what the paper says.

    python -m official.fedgala --dataset pacs --target photo

All else is that of fedgala.py, whose flags also have the release's values here. The networks are not
the release's.

What differs                           paper              official                flag
what has one w_i                       the whole update   each tensor, BN's       --ga-unit
  (utils.Aggregation_by_Alignment)                        statistics too
scale of g_i (the same)                g_i                p_i g_i, from their     --ga-vectors
                                                          plain mean
predictor (federated_averaging)        not averaged       SimSiam's is            --predictor
optimizers (main.py)                   Adam 3e-3; SGD     Adam 1e-4; SGD's decay  --lr, --weight-decay
                                       .03, MoCo .025     1e-4, .03, SimSiam .025
linear classifier (linear_evaluation)  encoder, 3e-3      projector, 1e-4         --probe, --linear-lr
its images (the same)                  not said           plain; augmented        --linear-views
                                                          before 8fa0bf4
local alignment (client_update)        of a layer         of each tensor          --align-unit
BYOL's target network (models.py)      moving average     frozen                  --ema 1
"""

from dataclasses import dataclass

import fedgala
from common import arg, average, parse, pick, run, source
from fedgala import LAPTOP, OPTIMIZER, PAPER, SMOKE, Client, Learner, aligned_weights

import torch
from torch import Tensor


@dataclass
class Args(fedgala.Args):
    variant: str = arg("official", "settings: the release's, or the paper's", choices=("official", "paper"))
    ga_unit: str = arg("model", "what has one weight: the whole update, each layer, or each tensor",
                       choices=("model", "layer", "tensor"), source="text, Alg. 1, lines 5-11")
    ga_vectors: str = arg("updates", "what the cosines compare: the updates, or the updates multiplied by "
                                     "FedAvg's weights", choices=("updates", "scaled"),
                          source="text, Alg. 1, line 8")
    predictor: str = arg("local", "the predictor of byol and simsiam: stays on its client, or is averaged",
                         choices=("local", "shared"), source="text, Sec. 4")


OFFICIAL = (source("code 81451db, utils.py", align_unit="tensor", ga_unit="tensor", ga_vectors="scaled",
                   probe="projector", linear_lr=1e-4, linear_views="plain")
            | source("code 81451db, main.py", average="batches")
            | source("code 81451db, models.py", queue=65536))
VARIANTS = {"official": dict.fromkeys(PAPER, OFFICIAL)}

OF_OPTIMIZER = {
    "adam": source("code 81451db, main.py", lr=1e-4, momentum=0.0, weight_decay=0.0),
    "sgd": source("code 81451db, main.py", lr=0.03, momentum=0.9, weight_decay=1e-4),
}
OF_LEARNER = {
    "simclr": {},
    "moco": source("code 81451db, models.py", ema=0.999),
    "byol": source("code 81451db, models.py", ema=1.0),
    "simsiam": source("code 81451db, utils.py", predictor="shared"),
}


def by_learner(values: dict) -> dict:
    """Values that follow from others: the learner's optimizer, and what goes with both."""
    if values["variant"] == "paper":
        return fedgala.by_learner(values)
    optimizer = values["optimizer"] or OPTIMIZER[values["ssl"]]
    derived = source("code 81451db, main.py", optimizer=optimizer)
    derived |= OF_OPTIMIZER[optimizer] | OF_LEARNER[values["ssl"]]
    if (values["ssl"], optimizer) == ("simsiam", "sgd"):
        derived |= source("code 81451db, main.py", lr=0.025)
    if values["dataset"] in ("digits", "rotatedmnist") and optimizer == "adam":
        derived |= source("ours", lr=1e-3)
    return derived


class Server(fedgala.Server):

    def aligned_average(self, models: list[dict[str, Tensor]], p: Tensor) -> dict[str, Tensor]:
        """Each unit with weights of its own."""
        if self.args.ga_unit == "model":
            return super().aligned_average(models, p)
        new = {}
        for names in fedgala.units(list(self.w), self.args.ga_unit):
            w = p
            if self.args.global_alignment:
                w = self.weights(models, self.compared(names), p)
            new |= average([pick(theta_i, names) for theta_i in models], w)
        return new

    def compared(self, names: list[str]) -> list[str]:
        """What decides on a unit: its parameters, also for BN's statistics. Statistics that are a unit by
        themselves have their own weights; counters have none."""
        trained = [n for n in names if n in self.parameters]
        return trained or [n for n in names if self.w[n].is_floating_point()]

    def weights(self, models: list[dict[str, Tensor]], names: list[str], p: Tensor) -> Tensor:
        if not names:
            return p
        if self.args.ga_vectors == "updates":
            return super().weights(models, names, p)
        g = []
        for theta_i, p_i in zip(models, p.tolist()):
            g.append(p_i * self.update_of(theta_i, names).double())
        return aligned_weights(g, torch.full_like(p, 1 / len(p)), self.args.ga_iterations)


def build(args: Args, channels: int, classes: int) -> Learner:
    learner = fedgala.build(args, channels, classes)
    if args.predictor == "shared":
        learner.travels = ("f.", "g.", "q.")
    return learner


def arguments(argv: list[str] | None = None) -> Args:
    """The arguments of a run from a command line."""
    return parse(Args, PAPER, argv, variants=VARIANTS, laptop=LAPTOP, smoke=SMOKE, follows=by_learner)


if __name__ == "__main__":
    run(Server, Client, arguments(), build)
