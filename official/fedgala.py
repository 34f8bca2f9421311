"""FedGaLA as released (MahdiyarMM/FedGaLA @ 81451db): where its code does not do what the paper says.

    python -m official.fedgala --dataset pacs --target photo

All else is that of fedgala.py, whose flags also have the release's values here. The networks are not
the release's.

What differs                           paper              official                flag
what has one w_i                       the whole update   each tensor, BN's       --ga-unit
  (utils.Aggregation_by_Alignment)                        statistics too
scale of g_i (the same)                g_i                p_i g_i                 --ga-vectors
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
from common import Payload, arg, average, flatten, parse, pick, run, source
from fedgala import LAPTOP, OPTIMIZER, PAPER, SMOKE, Client, Learner, cosine, weighted_sum

import torch
from torch import Tensor


@dataclass
class Args(fedgala.Args):
    variant: str = arg("official", "settings of the released code, or of the paper",
                       choices=("official", "paper"))
    ga_unit: str = arg("model", "what gets a weight of its own: the whole update, each layer, or each tensor",
                       choices=("model", "layer", "tensor"), source="text, Alg. 1, lines 5-11")
    ga_vectors: str = arg("updates", "vectors that the cosines compare: the updates, or the updates "
                                     "multiplied by FedAvg's weights", choices=("updates", "scaled"),
                          source="text, Alg. 1, line 8")
    predictor: str = arg("local", "predictor of byol and simsiam: local (stays on its client) or shared "
                                  "(averaged)", choices=("local", "shared"), source="text, Sec. 4")


OFFICIAL = (source("code 81451db, utils.py", align_unit="tensor", ga_unit="tensor", ga_vectors="scaled",
                   probe="projector", linear_lr=1e-4, linear_views="plain")
            | source("code 81451db, main.py", average="batches")
            | source("code 81451db, models.py", queue=65536))
VARIANTS = {"official": dict.fromkeys(PAPER, OFFICIAL)}

OF_OPTIMIZER = {
    "adam": source("code 81451db, main.py", momentum=0.0, weight_decay=0.0),
    "sgd": source("code 81451db, main.py", momentum=0.9, weight_decay=1e-4),
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
    return derived | learning_rate(values, optimizer)


def learning_rate(values: dict, optimizer: str) -> dict:
    if optimizer == "sgd" and values["ssl"] == "simsiam":
        return source("code 81451db, main.py", lr=0.025)
    if optimizer == "sgd":
        return source("code 81451db, main.py", lr=0.03)
    if values["dataset"] in ("digits", "rotatedmnist"):
        return source("ours", lr=1e-3)
    return source("code 81451db, main.py", lr=1e-4)


def aligned_weights(g: list[Tensor], p: Tensor, iterations: int) -> Tensor:
    """The weights w [K] of the updates g_i [P]: lines 6-10, as in fedgala.global_alignment."""
    g_mean = weighted_sum(g, p)
    for _ in range(iterations):
        cosines = torch.stack([cosine(g_i, g_mean) for g_i in g])  # [K]
        w = (cosines + 1) / 2
        w = w / w.sum()
        g_mean = weighted_sum(g, w)
    return w


class Server(fedgala.Server):

    def update(self, uploads: dict[int, Payload], t: int) -> None:
        """Alg. 1, lines 5-12, but each unit has weights of its own."""
        p = self.weights_of_fedavg(uploads)
        models = [up["w"] for up in uploads.values()]
        units = [list(self.w)]
        if self.args.ga_unit != "model":
            units = fedgala.layer_groups(list(self.w), self.args.ga_unit)
        new = {}
        for names in units:
            w = p
            if self.args.global_alignment:
                w = self.weights(models, self.compared(names), p)
            new |= average([pick(theta_i, names) for theta_i in models], w)
        for name, theta in self.w.items():
            if all(torch.equal(theta_i[name], theta) for theta_i in models):
                new[name] = theta  # discarded by all
        self.w = new

    def compared(self, names: list[str]) -> list[str]:
        """What decides on a unit: its parameters, also for BN's statistics. Statistics that are a unit by
        themselves have their own weights; counters have none."""
        trained = [n for n in names if n in self.parameters]
        return trained or [n for n in names if self.w[n].is_floating_point()]

    def weights(self, models: list[dict[str, Tensor]], names: list[str], p: Tensor) -> Tensor:
        """The weights [K] of a unit by what is compared of it."""
        args, g = self.args, []
        if not names:
            return p
        for theta_i in models:
            g.append(flatten([theta_i[n] - self.w[n] for n in names]))
        if args.ga_vectors == "scaled":
            g = [p_i * g_i.double() for p_i, g_i in zip(p.tolist(), g)]
            p = torch.full_like(p, 1 / len(p))
        return aligned_weights(g, p, args.ga_iterations)


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
