"""What the papers measure of finished runs: representations, distances between domains, risks and costs.

    python measures.py tsne runs/fedavg-... runs/fedsr-...             # FedSR, App. C.2, Fig. 1
    python measures.py pad  runs/fedcir-... runs/fedavg-... --out F    # FedCiR, Sec. 6.4, Fig. 12
    python measures.py risk runs/fedcir-... runs/fedavg-...            # FedCiR, Sec. 6.4, Fig. 11
    python measures.py cost runs/fedcir-... --accuracy 0.6             # FedCiR, Sec. 6.5, Table 3
    python measures.py gradients runs/fedgala-...                      # FedGaLA, Sec. 5.2, Fig. 2(a)
    python measures.py curve runs/fedgala-... runs/fedgala-... --of discarded      # FedGaLA, Fig. 2(b); 3(b), 3(d)

A run is its output folder: result.json names the method and its arguments, best.pt and checkpoint.pt hold the state of
server and clients. `federation` puts them together again, so that everything below looks at exactly the networks that were
tested. Nothing here trains or changes a run, except that `training_flops` trains one client for a round to count its work.

Figure or table                     Function
FedSR App. C.2, Fig. 1   t-SNE      draw_tsne
FedCiR Sec. 6.4, Fig. 11 risks      local_risks (of a state), risk_curve (of the training losses, by round), draw_risks
FedCiR Sec. 6.4, Fig. 12 PAD        proxy_a_distance, pad_table, draw_pad
FedCiR Sec. 6.5, Table 3 overhead   flops, training_flops, cost_to_reach
FedGaLA Sec. 5.2, Fig. 2(a)         gradient_pairs, mutual_information, draw_gradients
FedGaLA Figs. 2(b), 3(b), 3(d)      curve_of, draw_curves
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

import common
from basics import Stop, ending, load_file, seed_all, write_json, write_whole
from common import Args, Data, autocast, images_in_round, in_order, make_clients, representations, targets_of, to_device
from domains import load_domains

HERE = Path(__file__).resolve().parent
FILES = {"best": "best.pt", "last": "checkpoint.pt"}
ABLATIONS = {"fedavg": "FedAvg", "fedl2r": "FedL2R", "fedcmi": "FedCMI", "fedreg": "FedReg", "fedalign": "FedAlign"}
C = 0.1  # of the SVM, see proxy_a_distance


# A finished run, put together again


def finished(folder) -> dict:
    """result.json of a run's folder. Stop if there is none or it is no result."""
    path = Path(folder) / "result.json"
    try:
        result = json.loads(path.read_text())
        if result["method"] == result["args"]["method"] and all(result[w]["round"] > 0 for w in FILES):
            return result
    except (FileNotFoundError, NotADirectoryError):
        raise Stop(f"{path}: no such file; give the output folder of a finished run", 2)
    except (ValueError, KeyError, TypeError):
        pass
    raise Stop(f"{path} is damaged or no result of a run: give the output folder of a finished run", 2)


def history(folder) -> list[dict]:
    """The lines of metrics.jsonl, one for each round."""
    path = Path(folder) / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if lines and all(isinstance(h["round"], int) and isinstance(h["clients"], dict) for h in lines):
            return lines
    except (FileNotFoundError, NotADirectoryError):
        raise Stop(f"{path}: no such file; give the output folder of a finished run", 2)
    except (ValueError, KeyError, TypeError):
        pass
    raise Stop(f"{path} is damaged: expected one line of metrics for each round", 2)


def method(name):
    """The module of a method file of this repository. A result.json is only data: it cannot have anything else imported."""
    for place in ((HERE, ""), (HERE / "baselines", "baselines.")) if isinstance(name, str) and name.isidentifier() else ():
        file = place[0] / f"{name}.py"
        if file.is_file():
            module = importlib.import_module(place[1] + name)
            if Path(module.__file__).resolve() == file and all(isinstance(getattr(module, part, None), type)
                                                               for part in ("Server", "Client", "Args")):
                return module
    raise Stop(f"{str(name)[:60]!r} is no method of this repository: expected the name of a file with Server, Client and "
               f"Args", 2)


def recorded_args(cls: type[Args], key: dict, folder, data: str, archives: str) -> Args:
    """The arguments of a run from its identity. A field that the record lacks takes its default, one that `cls` lacks is
    left out; what is no number of the run (folders) comes from the caller. A GPU is used if the run had one and one is here.
    """
    values = {}
    for f in dataclasses.fields(cls):
        if f.metadata["numbers"] and f.name in key:
            value, kind = key[f.name], type(f.default)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise Stop(f"{Path(folder) / 'result.json'}: {f.name} is {value!r}; expected a value like {f.default!r}", 2)
            values[f.name] = value
    args = cls(**values | {"data": data, "archives": archives, "out": str(folder)})
    if args.weights not in ("none", "imagenet"):  # a file; its hash follows its name
        args.weights = args.weights.rpartition(" ")[0]
        if common.identity(args)["weights"] != key["weights"]:
            raise Stop(f"the run started from the weights {key['weights']}; {args.weights} is missing or another file", 2)
    args.device = common.choose_device("cpu" if args.device == "cpu" else "auto")
    return args


def data_of(args: Args, folder):
    """(clients' data, targets' data, class names, shape of an image) of a run."""
    try:
        domains, classes = load_domains(args)
    except KeyError as e:
        raise Stop(f"{Path(folder) / 'result.json'}: there is no dataset {e} here", 2)
    members, targets = make_clients(args, domains, len(classes))
    return members, targets, classes, domains[0].images.shape[1:]


def federation(folder, which: str = "best", data: str = "data", archives: str = ""):
    """(args, server, clients, targets, classes) of the finished run in `folder`.

    `which`: "best" (after the best validation round) or "last". `clients` are the run's Client objects, in order;
    `targets` are those of the domains that were left out; `classes` are the class names. `clients[k].model(server.download(k))`
    is the network that client k was tested with, the first target's number is len(clients). One scratch network is shared by all
    of them, so a call of model() overwrites what the call before returned: `tested` goes through them one by one, seeded as
    the round loop does. `data` and `archives` as the flags of a run. Stop if the folder does not hold a whole finished run.
    """
    if which not in FILES:
        raise Stop(f"which is {which!r}; expected best or last", 2)
    result = finished(folder)
    module = method(result["method"])
    args = recorded_args(module.Args, result["args"], folder, data, archives)
    path = Path(folder) / FILES["last" if args.protocol == "linear" else which]  # without labels the last round is the best
    saved = load_file(path, "checkpoint")
    try:
        same = json.loads(saved["identity"]) == result["args"] and saved["round"] == result[which]["round"]
    except (KeyError, TypeError, ValueError):
        raise Stop(f"{path} is no whole checkpoint: give the output folder of a finished run", 2)
    if not same:
        raise Stop(f"{path} and result.json beside it are of different runs or rounds: let the run finish first", 2)
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = args.precision == "tf32"
    members, targets, classes, shape = data_of(args, folder)
    seed_all(args.seed, "init")  # what is drawn from here on and kept outside the states is what the run had
    try:
        net = getattr(module, "build", common.backbone)(args, shape[0], len(classes))
        net.eval()(torch.zeros(2, *shape))
        net.to(args.device, memory_format=torch.channels_last)
        server = module.Server(args, net, len(members))
        clients = [module.Client(args, net, k, c) for k, c in enumerate(members + targets)]
        server.load_state_dict(to_device(saved["server"], args.device))
        for k, client in enumerate(clients):
            client.load_state_dict(to_device(saved["clients"][k], args.device))
        clients[0].model(server.download(0))  # fails if the tensors do not fit the network
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        why = f"{type(e).__name__}: {str(e)[:80]}".splitlines()[0]
        raise Stop(f"{path} does not fit {result['method']}.py as it is now ({why})", 2)
    return args, server, clients[:len(members)], clients[len(members):], classes


def tested(folder, which: str = "best", data: str = "data", archives: str = "", made: tuple | None = None):
    """Yield (args, client, the network it was tested with) for each client of a run and last for its targets. Use a network
    before the next is asked for: they share their memory. `made`: what `federation` has returned for the same run."""
    args, server, clients, targets, _ = made or federation(folder, which, data, archives)
    rounds = finished(folder)[which]["round"]
    for k, client in enumerate(clients + targets):
        seed_all(args.seed, "evaluate", rounds, k)  # as common.Loop.evaluate
        yield args, client, client.model(server.download(k))


def label(folder) -> str:
    """A run's method as the papers write it: the first word of its file, or the ablation that its variant is, or both."""
    result = finished(folder)
    module = method(result["method"])
    variant = result["args"].get("variant")
    if variant in ABLATIONS:
        return ABLATIONS[variant]
    usual = variant in (None, getattr(module.Args, "variant", None))
    return (module.__doc__ or result["method"]).split(":")[0].split("\n")[0] + ("" if usual else f" ({variant})")


def labels(folders) -> list[str]:
    """The labels of several runs; those that are equal get the arguments in which the runs differ, or the folder's name."""
    found = [label(f) for f in folders]
    keys = [finished(f)["args"] for f in folders]
    names = []
    for name, f, key in zip(found, folders, keys):
        same = [k for other, k in zip(found, keys) if other == name]
        differ = [a for a in key if any(k.get(a) != key[a] for k in same)]
        what = ", ".join(f"{a} {key[a]}" for a in differ[:3]) or Path(f).resolve().name
        names.append(name if len(same) == 1 else f"{name} [{what}]")
    return [name if names.count(name) == 1 else f"{name} [{Path(f).resolve().name}]" for name, f in zip(names, folders)]


# Representations and their distance


def of_client(client, model: nn.Module, args: Args, part: str) -> tuple[Tensor, Tensor]:
    """The representations of a client's test images (`part` "test") or of all its images ("all")."""
    data = client.data
    parts = [d for d in ((data.test,) if part == "test" else (data.train, data.val, data.test)) if len(d)]
    if not parts:
        raise Stop(f"all images of {data.name} are for training: give --part all", 2)
    zs, ys = zip(*(representations(model, d, args) for d in parts))
    z = torch.cat(zs)
    if not torch.isfinite(z).all():
        raise Stop(f"the representations of {data.name} are not finite: the run has diverged")
    return z, torch.cat(ys)


def proxy_a_distance(a, b, seed: int = 0) -> float:
    """PAD = 2(1 - 2 eps) between two sets of representations [N, D] and [M, D] (FedCiR, Sec. 6.4).

    eps is the test error of a linear SVM that tells the sets apart. `seed` draws as many rows of the larger set as the
    smaller has, one half of each trains the SVM and the other tests it; inputs are standardized by the training half. 2: a
    hyperplane separates the sets; 0: it is no better than chance. It is not clamped: on a finite test half of equal
    distributions eps can pass 1/2, and PAD is then slightly below 0. The paper gives neither its C nor its split. C = 0.1
    here, fixed: on Gaussian sets of 60 and 600 rows in 64 and 1,024 dimensions, isotropic or of rank 8, its error was within
    0.04 of the best C in 1e-4...1, but for low-rank sets of 60 rows in 64 dimensions (0.08), where C = 1 is better. C is not
    chosen by the test half, which would bias eps downwards. Stop if a set has fewer than 4 rows.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    n = min(len(a), len(b))
    if n < 4:
        raise Stop(f"a proxy A-distance needs 4 images of each domain; there are {len(a)} and {len(b)}: take all images of "
                   f"a client instead of its test part", 2)
    generator = seed_all(seed, "pad")
    a, b = (x[torch.randperm(len(x), generator=generator)[:n].numpy()] for x in (a, b))
    half = n // 2
    train, test = np.concatenate([a[:half], b[:half]]), np.concatenate([a[half:], b[half:]])
    side = lambda m: np.repeat([0, 1], m)
    scaler = StandardScaler().fit(train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the rest of its error is far below that of a finite test half
        svm = LinearSVC(C=C, random_state=0, max_iter=2000).fit(scaler.transform(train), side(half))
    eps = 1 - svm.score(scaler.transform(test), side(n - half))
    return 2 * (1 - 2 * eps)


def pad_table(folder, which: str = "best", part: str = "test", data: str = "data", archives: str = "",
              seed: int = 0) -> dict:
    """PAD between each pair of a run's clients, and between the mixture of all and each of them (FedCiR, Fig. 12).

    Each client's images are represented by the network that it is tested with; `part`: its "test" images or "all". The
    mixture is the union of the clients' images, as in FedCiR's Eq. (1); the images drawn for it are left out of the client
    it is compared with, so that no image is on both sides. A mixture holds the client too: its PAD to a client with the
    share p of all images is at most 2(1 - p) in the limit. Returns {"method", "images": {name: N}, "pairs": {"a / b": PAD},
    "global": {name: PAD}, "mean_pairs", "mean_global"}.
    """
    z = {}
    for args, client, model in tested(folder, which, data, archives):
        z[client.data.name] = of_client(client, model, args, part)[0]
    names = [name for name in z if name not in targets_of(args, list(z))]  # a target is no client
    if len(names) < 2:
        raise Stop(f"{folder} has one client; a distance needs two", 2)
    pairs = {f"{a} / {b}": proxy_a_distance(z[a], z[b], seed) for i, a in enumerate(names) for b in names[i + 1:]}
    pool = torch.cat([z[a] for a in names])
    owner = torch.cat([torch.full((len(z[a]),), k) for k, a in enumerate(names)])
    order = torch.randperm(len(pool), generator=seed_all(seed, "mixture"))
    to_global = {}
    for k, a in enumerate(names):
        m = int(len(z[a]) / (1 + len(z[a]) / len(pool)))  # m in the mixture leave about m of the client
        rest = order[m:]
        to_global[a] = proxy_a_distance(pool[order[:m]], pool[rest[owner[rest] == k]], seed)
    return {"folder": str(folder), "method": label(folder), "which": which, "part": part,
            "images": {a: len(z[a]) for a in names}, "pairs": pairs, "global": to_global,
            "mean_pairs": float(np.mean(list(pairs.values()))), "mean_global": float(np.mean(list(to_global.values())))}


# Risks


@torch.no_grad()
def risk(model: nn.Module, data: Data, args: Args) -> float:
    """The mean cross-entropy of `model` on `data`, in eval mode, in nats."""
    model.eval()
    total = 0.0
    for x, y in in_order(data, args):
        with autocast(args):
            logits = model(x)
        total += float(cross_entropy(logits.float(), y, reduction="sum"))
    return total / len(data)


def local_risks(folder, which: str = "best", data: str = "data", archives: str = "") -> dict:
    """Cross-entropy of the global model on each client's images, and its mean over clients (FedCiR, Fig. 11), in nats.

    The model is the one that the client is tested with. Returns {"method", "clients": {name: {"train", "test"}}, "mean":
    {"train", "test"}} and, for leave-one-domain-out runs, "target": {"name", "test"}.
    """
    found, target = {}, {}
    for args, client, model in tested(folder, which, data, archives):
        name = client.data.name
        if args.protocol == "linear":
            raise Stop(f"{folder} was trained without labels: its networks have no classifier and no cross-entropy", 2)
        if args.protocol == "lodo" and name == args.target:
            target = {"target": {"name": name, "test": risk(model, client.data.test, args)}}
        else:
            found[name] = {p: risk(model, getattr(client.data, p), args) for p in ("train", "test")}
    return {"folder": str(folder), "method": label(folder), "which": which, "clients": found,
            "mean": {p: float(np.mean([r[p] for r in found.values()])) for p in ("train", "test")}} | target


def risk_curve(folder) -> tuple[list[int], list[float]]:
    """The rounds and, for each, the mean over its clients of the mean training loss (metrics.jsonl). Fig. 11 by round: a
    checkpoint has one round only, the losses during local training are what a run keeps of all of them. The loss is what the
    method records as such: the task's, without regularizers, where the method's file says so."""
    rounds, losses = [], []
    for h in history(folder):
        values = [c["loss"] for c in h["clients"].values() if "loss" in c]
        if values:
            rounds.append(h["round"])
            losses.append(float(np.mean(values)))
    if not rounds:
        raise Stop(f"{Path(folder) / 'metrics.jsonl'} has no training losses: this method records none", 2)
    return rounds, losses


# Costs


def _conv_backward(grad, x, w, _bias, _stride, _padding, _dilation, transposed, _out_padding, _groups, mask, out_shape=None):
    """FLOPs of a convolution's backward pass: each gradient costs as much as the forward pass. (torch's own count of the
    weight's gradient leaves out that the channels are in groups, which is wrong for FDSE's depthwise convolutions.)"""
    return (bool(mask[0]) + bool(mask[1])) * conv_flop_count(x, w, grad, transposed)


def counter() -> FlopCounterMode:
    """Counts 2 FLOPs for each multiply-add of matrix products, convolutions and attention; the rest counts nothing."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _conv_backward})


def flops(model: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    """(forward, training step) FLOPs of a network for a batch of `shape` [B, C, H, W], B at least 2.

    A training step is one forward and one backward pass; that of the first layer has no gradient of its input. The
    optimizer, BN, activations and what a method adds to the loss count nothing (`training_flops` counts the latter). The
    model is copied and not changed.
    """
    model = copy.deepcopy(model)
    x = torch.zeros(shape, device=next(model.parameters()).device)
    with counter() as forward, torch.no_grad():
        model.eval()(x)
    with counter() as step:
        model.train()(x).sum().backward()
    return forward.get_total_flops(), step.get_total_flops()


def training_flops(folder, data: str = "data", archives: str = "") -> float:
    """FLOPs of a run's local training for each image, all of it: the regularizers' passes and generators too.

    They are counted in one round of the client with the fewest training images, from the run's last state.
    """
    args, server, clients, *_ = federation(folder, "last", data, archives)
    k = min(range(len(clients)), key=lambda k: len(clients[k].data.train))
    seed_all(args.seed, "train", args.rounds - 1, k)
    with counter() as c:
        clients[k].train(server.download(k), args.rounds - 1)
    return c.get_total_flops() / images_in_round(len(clients[k].data.train), args)


def cost_to_reach(folder, accuracy: float, flops_per_image: float, sizes: dict[str, int] | None = None, by: str = "AVG",
                  data: str = "data", archives: str = "") -> dict | None:
    """What a client has spent, on average, when a run first reaches an accuracy (FedCiR, Table 3); None if it never does.

    `accuracy` in (0, 1]; `by`: test "AVG" or "ALL", or "target" (the left-out domain), at the rounds that were evaluated.
    `sizes`: training images of each client by name (None: from the data). Returns "round"; "tflops", 1e12 FLOPs of local
    training until then, from the images of the rounds that a client took part in; "gb", 1e9 bytes up and down; "memory_mib"
    and "gpu_memory_mib" (None without a GPU), the peaks of the whole run in MiB. Means are over all clients of the run.
    """
    if not 0 < accuracy <= 1:
        raise Stop(f"the accuracy to reach is {accuracy}; expected a share above 0 and at most 1, such as 0.6", 2)
    if by not in ("AVG", "ALL", "target"):
        raise Stop(f"the accuracy to reach is of {by!r}; expected AVG, ALL or target", 2)
    result, lines = finished(folder), history(folder)
    args = recorded_args(method(result["method"]).Args, result["args"], folder, data, archives)
    evaluated = [h for h in lines if ("target" if by == "target" else "test") in h]
    if not evaluated:
        raise Stop(f"{Path(folder) / 'metrics.jsonl'} has no accuracy {by}", 2)
    reached = next((h["round"] for h in evaluated if (h["target"] if by == "target" else h["test"][by]) >= accuracy), None)
    if reached is None:
        return None
    if sizes is None:
        sizes = {c.name: len(c.train) for c in data_of(args, folder)[0]}
    each = {name: images_in_round(n, args) for name, n in sizes.items()}
    images = total = 0
    try:
        for h in lines:
            if h["round"] <= reached:
                images += sum(each[name] for name in h["clients"])
                total += sum(c["bytes_up"] + c["bytes_down"] for c in h["clients"].values())
        memory = {"memory_mib": result["peak_memory_mib"],
                  "gpu_memory_mib": result.get("hardware", {}).get("gpu_peak_memory_mib")}
    except KeyError as e:
        raise Stop(f"{folder}: metrics.jsonl, result.json and the data do not go together: {e} is missing", 2)
    tflops, gb = images * flops_per_image / len(sizes) / 1e12, total / len(sizes) / 1e9
    return {"round": reached, "tflops": tflops, "gb": gb} | memory


# Gradients and domains


def gradient_pairs(folder, which: str = "best", batches: int = 16, data: str = "data", archives: str = "") -> dict:
    """For each pair of a run's domains, the covariance of their gradients and the mutual information of their images
    (FedGaLA, Theorem 1, Sec. 5.2, Fig. 2(a), which do not say how it was measured).

    The gradient of a domain is the mean over `batches` batches of the global model's training loss on it, one vector over all
    parameters that travel; covariance and cosine of two of them are over the coordinates. Returns {"method", "pairs":
    {"a / b": {"covariance", "cosine", "information", "chance"}}}; information in nats, see `mutual_information`.
    """
    made = args, server, _, targets, _ = federation(folder, which, data, archives)
    travelling = server.download(0).get("w")
    if travelling is None:
        raise Stop(f"{folder} is a run of {common.method_name(args)}, whose clients do not get a whole network w; gradients needs one, as of "
                   "fedavg, fedsr, fedcir or fedgala", 2)
    gradients, parts = {}, {}
    for k, (_, client, model) in enumerate(tested(folder, which, made=made)):
        name, part = client.data.name, client.data.test if client in targets else client.data.train
        some = dataclasses.replace(args, steps=batches, batch_size=min(args.batch_size, len(part)))
        seed_all(args.seed, "gradients", k)
        model.train().zero_grad()
        for x, y in common.batches(part, some, 0, k):
            with autocast(args):
                loss = model.loss(*x.chunk(2)) if args.protocol == "linear" else cross_entropy(model(x), y)
            (loss / batches).backward()
        gradients[name] = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if n in travelling and p.grad is not None])
        parts[name] = part
    pairs = {}
    names = list(gradients)
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            u, v = gradients[a].double(), gradients[b].double()
            information, chance = mutual_information(parts[a], parts[b], seed=args.seed)
            pairs[f"{a} / {b}"] = {"covariance": float(((u - u.mean()) * (v - v.mean())).mean()), "cosine": float(u @ v / (u.norm() * v.norm())),
                                   "information": information, "chance": chance}
    return {"folder": str(folder), "method": label(folder), "which": which, "pairs": pairs}


def mutual_information(a: Data, b: Data, size: int = 32, seed: int = 0) -> tuple[float, float]:
    """FedGaLA's Lemma 1, Eq. (3), in nats: -1/2 sum_f log(1 - rho_f^2) over the features f of pairs of images of two domains, and
    what it is by chance.

    Features are the pixels at `size` x `size`. A pair is two images of the same class, as many as the smaller domain of a class
    has, drawn by the seed; rho_f is the correlation of feature f over the pairs. By chance: the mean over five random
    pairings of the same images, which estimates how far the finite number of pairs alone lifts the sum from 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def rows(part, c, n):
        of_class = (part.labels.cpu() == c).nonzero()[:, 0]
        return of_class[torch.randperm(len(of_class), generator=generator)[:n]]

    counts = {int(c): min(int((d.labels == c).sum()) for d in (a, b)) for c in a.labels.unique()}
    x, y = (pixels(part, torch.cat([rows(part, c, n) for c, n in counts.items()]), size) for part in (a, b))
    if len(x) < 8:
        raise Stop(f"two domains have {len(x)} pairs of images of the same class; the mutual information needs at least 8", 2)

    def information(y):
        rho = ((x - x.mean(0)) * (y - y.mean(0))).mean(0) / (x.std(0, correction=0) * y.std(0, correction=0)).clamp(min=1e-12)
        return float(-0.5 * torch.log1p(-rho.square().clamp(max=1 - 1e-12)).sum())

    shuffled = [information(y[torch.randperm(len(y), generator=generator)]) for _ in range(5)]
    return information(y), float(np.mean(shuffled))


def pixels(part: Data, rows: Tensor, size: int) -> Tensor:
    """Images of `part` as features float64 [n, C * size * size] in [0, 1]."""
    found = []
    for i in rows.to(part.index.device).split(500):
        x = part.batch(i)[0].cpu()
        found.append(interpolate(x, (size, size), mode="area").flatten(1).double())
    return torch.cat(found)


def curve_of(folder, of: str) -> tuple[list[int], list[float]]:
    """Rounds and values of what a run has logged: `target`, an accuracy by its name in the result's curve (`ALL`, `photo 0.1`),
    or the mean over the clients of what they log (`loss`, `discarded`). Accuracies and shares are in [0, 1]."""
    result, lines = finished(folder), history(folder)
    if of in result["curve"]:
        return result["curve"]["round"], result["curve"][of]
    points = [(h["round"], [c[of] for c in h["clients"].values() if of in c]) for h in lines]
    points = [(t, float(np.mean(values))) for t, values in points if values]
    if not points:
        logged = sorted({n for h in lines for c in h["clients"].values() for n in c} | set(result["curve"]) - {"round"})
        raise Stop(f"{folder} has not logged {of!r}; it has {', '.join(logged)}", 2)
    return [t for t, _ in points], [v for _, v in points]


# Figures


def write_figure(path, figure) -> None:
    """Write a figure whole, in the format of the file's ending: png, pdf or svg."""
    path, content = Path(path), io.BytesIO()
    figure.savefig(content, dpi=150, format=figure_format(path))
    write_whole(path, lambda f: f.write(content.getvalue()))


def figure_format(path) -> str:
    ending = Path(path).suffix.lower()[1:]
    if ending not in ("png", "pdf", "svg") or Path(path).is_dir():
        raise Stop(f"{path} cannot be a figure: give a file that ends in .png, .pdf or .svg", 2)
    return ending


def embed(a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[N, D] and [M, D] -> [N, 2] and [M, 2]: one t-SNE of both together, so that equal places are equal representations."""
    from sklearn.manifold import TSNE
    n = len(a) + len(b)
    if n < 5:
        raise Stop(f"a t-SNE needs at least 5 images; there are {n}", 2)
    flat = TSNE(init="pca", perplexity=min(30, (n - 1) / 3), random_state=0).fit_transform(torch.cat([a, b]).numpy())
    return flat[:len(a)], flat[len(a):]


def draw_tsne(path, rows: list, classes=None) -> list[tuple[np.ndarray, np.ndarray]]:
    """FedSR, App. C.2, Fig. 1: the representations of a source domain (left) and of the target domain (right).

    A row for each run: (its label, (source name, z [N, D], y [N]), (target name, z [M, D], y [M])). The two panels of a row
    show one joint t-SNE of both domains, with the same axes; colours are classes, in all rows alike, named by `classes`.
    The axes of a t-SNE have no unit and get no numbers. Returns the embeddings of each row.
    """
    import matplotlib
    from matplotlib.figure import Figure
    count = 1 + max(int(y.max()) for _, *sides in rows for _, _, y in sides)
    if count <= 20:
        colours = [matplotlib.colormaps["tab10" if count <= 10 else "tab20"](c) for c in range(count)]
    else:
        colours = [matplotlib.colormaps["turbo"](c / (count - 1)) for c in range(count)]
    figure = Figure(figsize=(8.2, 3.7 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    embedded = []
    for (name, *sides), pair in zip(rows, panels):
        flats = embed(*(z for _, z, _ in sides))
        embedded.append(flats)
        both = np.concatenate(flats)
        middle, reach = (both.max(0) + both.min(0)) / 2, 0.54 * (both.max(0) - both.min(0)).max()
        for panel, flat, (domain, _, y), role in zip(pair, flats, sides, ("source", "target")):
            mixed = np.random.default_rng(0).permutation(len(flat))  # else the last class would lie over all others
            panel.scatter(*flat[mixed].T, s=7, alpha=0.75, linewidths=0, c=[colours[int(c)] for c in y[mixed]])
            panel.set(title=f"{name}: {domain} ({role})", xticks=[], yticks=[], aspect="equal",
                      xlim=(middle[0] - reach, middle[0] + reach), ylim=(middle[1] - reach, middle[1] + reach))
            panel.title.set_fontsize(10)
    if count <= 20:
        names = [str(c) for c in (classes or range(count))]
        marks = [matplotlib.lines.Line2D([], [], linestyle="", marker="o", color=c, label=n) for c, n in zip(colours, names)]
        figure.legend(handles=marks, loc="outside right center", title="class", fontsize=8, frameon=False)
    write_figure(path, figure)
    return embedded


def draw_pad(path, run_a: dict, run_b: dict) -> None:
    """FedCiR, Fig. 12: the PAD of method A (y) against that of method B (x), two results of `pad_table` on the same clients.

    Circles: pairs of clients; the star: the mean PAD of the mixture and a client. Below the diagonal A's is the smaller.
    """
    from matplotlib.figure import Figure
    if run_a["pairs"].keys() != run_b["pairs"].keys():
        raise Stop(f"{run_a['method']} and {run_b['method']} have different clients: compare runs on the same domains", 2)
    names, star = list(run_a["pairs"]), [[r["mean_global"]] for r in (run_b, run_a)]
    x, y = ([r["pairs"][n] for n in names] for r in (run_b, run_a))
    ends = min(x + y + star[0] + star[1]), max(x + y + star[0] + star[1])
    edge = max(0.06 * (ends[1] - ends[0]), 0.05)
    limits = ends[0] - edge, ends[1] + edge
    figure = Figure(figsize=(4.8, 4.8), layout="constrained")
    panel = figure.subplots()
    panel.plot(limits, limits, "--", color="0.5", linewidth=1, label="equal")
    panel.scatter(x, y, s=34, facecolors="none", edgecolors="tab:blue", linewidths=1.3, label="pair of clients")
    panel.scatter(*star, s=190, marker="*", color="hotpink", edgecolors="0.3", linewidths=0.6, zorder=3,
                  label="mixture and client (mean)")
    panel.set(xlabel=f"PAD, {run_b['method']}", ylabel=f"PAD, {run_a['method']}", xlim=limits, ylim=limits, aspect="equal")
    panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3, frameon=False, handletextpad=0.4,
                 columnspacing=1.2)
    write_figure(path, figure)


def draw_gradients(path, runs: list[dict]) -> None:
    """FedGaLA, Fig. 2(a): the gradients' covariance against the mutual information, a point for each pair of domains."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5.4, 4.2), layout="constrained")
    panel = figure.subplots()
    for run in runs:
        x, y = ([p[m] for p in run["pairs"].values()] for m in ("information", "covariance"))
        panel.scatter(x, y, s=36, label=run["method"])
        for name, u, v in zip(run["pairs"], x, y):
            panel.annotate(name, (u, v), textcoords="offset points", xytext=(0, 5), ha="center", fontsize=7)
    panel.set(xlabel="mutual information of the images, Eq. (3) (nats)", ylabel="covariance of the gradients")
    panel.margins(0.2)
    panel.legend(fontsize=8)
    write_figure(path, figure)


def draw_risks(path, runs: list[dict], curves: dict[str, tuple[list[int], list[float]]]) -> None:
    """FedCiR, Fig. 11. Left: for each result of `local_risks` the global model's cross-entropy on the test images of each client and its
    mean, a dot where that of the training images is; right: the clients' mean training loss over the rounds."""
    from matplotlib.figure import Figure
    names = list(dict.fromkeys(n for r in runs for n in r["clients"]))
    widths = max(5.0, 0.9 * len(names) + 2.6), 4.4
    figure = Figure(figsize=(sum(widths), 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=widths)
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        shown = [(j, run["clients"][n]) for j, n in enumerate(names) if n in run["clients"]] + [(len(names), run["mean"])]
        x = [j + (i + 0.5) * width - 0.4 for j, _ in shown]
        left.bar(x, [r["test"] for _, r in shown], 0.9 * width, color=f"C{i}", label=run["method"])
        left.plot(x, [r["train"] for _, r in shown], ".", color="0.2", label="on its training images" if run is runs[-1] else None)
    left.set_xticks(range(len(names) + 1), [*names, "mean"], rotation=20 if len(names) > 4 else 0)
    left.set(ylabel="cross-entropy of the global model (nats)")
    left.legend(fontsize=8)
    plot_curves(right, curves, "training loss of the local models")
    write_figure(path, figure)


def draw_curves(path, curves: dict[str, tuple[list[int], list[float]]], ylabel: str) -> None:
    """For each label a curve over the rounds."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    plot_curves(figure.subplots(), curves, ylabel)
    write_figure(path, figure)


def plot_curves(panel, curves: dict[str, tuple[list[int], list[float]]], ylabel: str) -> None:
    for name, (rounds, values) in curves.items():
        panel.plot(rounds, values, linewidth=1.4, label=name, marker="." if len(rounds) < 30 else None)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set(xlabel="round", ylabel=ylabel)
    panel.legend(fontsize=8)


# Command line


def pick_domains(folder, source: str, target: str, which: str, part: str, most: int, data: str, archives: str):
    """((source name, z, y), (target name, z, y), classes) of a run; at most `most` images of each, drawn by the run's seed.
    """
    made = _, _, clients, left_out, classes = federation(folder, which, data, archives)
    names = [c.data.name for c in clients + left_out]
    source, target = source or names[0], target or (left_out[0].data.name if left_out else "")
    for flag, name in (("--source", source), ("--target", target)):
        if name not in names:
            raise Stop(f"{folder}: {flag} is {name or 'empty and the run left no domain out'}; its domains are "
                       f"{', '.join(names)}", 2)
    if source == target:
        raise Stop(f"{folder}: source and target are both {source}: give another --source or --target", 2)
    found = {}
    for args, client, model in tested(folder, which, made=made):
        if client.data.name in (source, target):
            z, y = of_client(client, model, args, part)
            keep = torch.randperm(len(y), generator=seed_all(args.seed, "figure", client.data.name))[:most]
            found[client.data.name] = client.data.name, z[keep], y[keep]
    return found[source], found[target], classes


def show_tsne(given: dict) -> dict:
    options = {k: given[k] for k in ("source", "target", "which", "part", "data", "archives")} | {"most": given["images"]}
    rows, names, table, all_classes = [], labels(given["folders"]), [], set()
    for folder, name in zip(given["folders"], names):
        a, b, classes = pick_domains(folder, **options)
        all_classes.add(classes)
        rows.append((name, a, b))
        table.append([name, a[0], b[0], len(a[2]), len(b[2]), proxy_a_distance(a[1], b[1])])
    if len(all_classes) > 1:
        raise Stop("the runs have different classes: draw those of one dataset together", 2)
    embedded = draw_tsne(given["out"], rows, classes)
    print(tabulate(table, ["method", "source", "target", "images", "images", "PAD"], floatfmt=".3f"))
    return {"runs": [{"folder": str(f), "method": name, "source": a[0], "target": b[0], "pad": line[-1],
                      **{side: {"place": np.round(flat.astype(float), 3).tolist(), "class": y.tolist()}
                         for side, flat, (_, _, y) in zip(("source_points", "target_points"), flats, (a, b))}}
                     for f, (name, a, b), line, flats in zip(given["folders"], rows, table, embedded)]}


def show_pad(given: dict) -> dict:
    runs = [pad_table(f, given["which"], given["part"], given["data"], given["archives"]) | {"method": name}
            for f, name in zip(given["folders"], labels(given["folders"]))]
    lines = [*dict.fromkeys(pair for r in runs for pair in r["pairs"])]
    table = [[pair, *(r["pairs"].get(pair) for r in runs)] for pair in lines]
    names = dict.fromkeys(a for r in runs for a in r["global"])
    table += [[f"mixture / {a}", *(r["global"].get(a) for r in runs)] for a in names]
    table += [["mean of the pairs", *(r["mean_pairs"] for r in runs)],
              ["mean of mixture and client", *(r["mean_global"] for r in runs)]]
    if given["out"]:
        draw_pad(given["out"], *runs)
    print(tabulate(table, ["PAD", *(r["method"] for r in runs)], floatfmt=".3f"))
    return {"runs": runs}


def show_risk(given: dict) -> dict:
    runs = [local_risks(f, given["which"], given["data"], given["archives"]) | {"method": name}
            for f, name in zip(given["folders"], labels(given["folders"]))]
    curves = {r["method"]: risk_curve(r["folder"]) for r in runs}
    table = []
    for r in runs:
        table += [[r["method"], name, v["train"], v["test"]] for name, v in r["clients"].items()]
        table += [[r["method"], f"{r['target']['name']} (left out)", None, r["target"]["test"]]] if "target" in r else []
        table += [[r["method"], "mean of the clients", r["mean"]["train"], r["mean"]["test"]]]
    if given["out"]:
        draw_risks(given["out"], runs, curves)
    print(tabulate(table, ["method", "client", "train risk", "test risk"], floatfmt=".4f"))
    return {"runs": [r | {"curve": {"round": rounds, "loss": losses}} for r, (rounds, losses) in zip(runs, curves.values())]}


def show_cost(given: dict) -> dict:
    runs, table, place = [], [], (given["data"], given["archives"])
    for folder, name in zip(given["folders"], labels(given["folders"])):
        per_image = given["flops"] or training_flops(folder, *place)
        cost = cost_to_reach(folder, given["accuracy"], per_image, None, given["by"], *place)
        runs.append({"folder": str(folder), "method": name, "flops_per_image": per_image, "cost": cost})
        gpu = cost and cost["gpu_memory_mib"]
        table.append([name, *([cost["round"], cost["tflops"], cost["gb"], cost["memory_mib"], gpu] if cost else ["-"] * 5)])
    print(f"each client until {given['by']} reaches {100 * given['accuracy']:g}% (-: never, or no GPU)")
    print(tabulate(table, ["method", "round", "TFLOPs", "GB up and down", "memory (MiB)", "GPU memory (MiB)"],
                   floatfmt=(".0f", ".0f", ".3f", ".4f", ".0f", ".0f"), missingval="-"))
    return {"by": given["by"], "accuracy": given["accuracy"], "runs": runs}


def show_gradients(given: dict) -> dict:
    runs = [gradient_pairs(f, given["which"], given["batches"], given["data"], given["archives"]) | {"method": name}
            for f, name in zip(given["folders"], labels(given["folders"]))]
    table = [[r["method"], pair, v["covariance"], v["cosine"], v["information"], v["chance"]] for r in runs for pair, v in r["pairs"].items()]
    if given["out"]:
        draw_gradients(given["out"], runs)
    print(tabulate(table, ["method", "domains", "covariance", "cosine", "information (nats)", "by chance"],
                   floatfmt=("", "", ".3e", ".3f", ".1f", ".1f")))
    return {"runs": runs}


def show_curve(given: dict) -> dict:
    curves = {name: curve_of(f, given["of"]) for f, name in zip(given["folders"], labels(given["folders"]))}
    if given["out"]:
        draw_curves(given["out"], curves, given["of"])
    rounds = sorted({t for x, _ in curves.values() for t in x})
    picked = rounds if len(rounds) <= 12 else [rounds[i] for i in np.linspace(0, len(rounds) - 1, 12).round().astype(int)]
    table = [[t, *(dict(zip(*c)).get(t) for c in curves.values())] for t in picked]
    print(tabulate(table, [f"{given['of']}, round", *curves], floatfmt=".4f"))
    return {"of": given["of"], "curves": {name: {"round": x, "value": y} for name, (x, y) in curves.items()}}


# each flag: the commands that have it, its default, its help text
FLAGS = {
    "out": ("tsne pad risk gradients curve", "", "file of the figure, .png, .pdf or .svg; pad draws two folders, the first on "
            "the y axis; empty: tsne.png in the first folder for tsne, else no figure"),
    "source": ("tsne", "", "domain of the left panels; empty: the run's first client"),
    "target": ("tsne", "", "domain of the right panels; empty: the run's left-out domain"),
    "images": ("tsne", 1000, "most images of a domain in a panel, drawn by the run's seed"),
    "part": ("tsne pad", "", "images that are represented: test (the clients' test parts) or all; empty: all for tsne, test for pad"),
    "which": ("tsne pad risk gradients", "best", "state of the run: best (validation round) or last"),
    "accuracy": ("cost", 0.6, "accuracy to reach, above 0 and at most 1"),
    "by": ("cost", "AVG", "accuracy that is meant: AVG, ALL or target"),
    "batches": ("gradients", 16, "batches behind the gradient of a domain"),
    "of": ("curve", "target", "what is drawn over the rounds: target, ALL, AVG, loss, discarded, ..."),
    "flops": ("cost", 0.0, "FLOPs of training for each image; 0: counted in one more round of a client"),
    "data": ("tsne pad risk cost gradients", "data", "folder of the datasets and of the decoded cache"),
    "archives": ("tsne pad risk cost gradients", "", "folder with archives downloaded before; looked at before the network"),
    "json": ("tsne pad risk cost gradients curve", "", "file for the numbers behind the table and the figure; empty: none"),
}
CHOICES = {"part": ("test", "all"), "which": ("best", "last"), "by": ("AVG", "ALL", "target")}
SHOW = {"tsne": show_tsne, "pad": show_pad, "risk": show_risk, "cost": show_cost, "gradients": show_gradients, "curve": show_curve}


def main(argv: list[str] | None = None) -> None:
    """The command line. Bad usage or a folder that is no run ends it with one line on stderr and exit code 2."""
    parser = common.Parser(prog="measures", allow_abbrev=False, description=__doc__.split("\n\n")[0],
                           epilog="A run is changed by none of these. Numbers are from the networks that the run tested.")
    parser.add_argument("what", choices=tuple(SHOW), help="tsne: representations of two domains, a row for each run; "
                        "pad: proxy A-distances between clients; risk: cross-entropy on the clients' images; cost: what a "
                        "client spends to reach an accuracy; gradients: covariance of the domains' gradients and mutual "
                        "information of their images; curve: what a run logs, over the rounds")
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="output folder of a finished run")
    for name, (commands, default, text) in FLAGS.items():
        text = common.with_default(f"[{', '.join(commands.split())}] {text}", default)
        parser.add_argument(f"--{name}", help=text, default=None, type=type(default), choices=CHOICES.get(name),
                            metavar=None if name in CHOICES else type(default).__name__)
    parser.set_flags()
    given = vars(parser.parse_args(argv))
    what = given["what"]
    for name, (commands, default, _) in FLAGS.items():
        if given[name] is not None and what not in commands.split():
            parser.error(f"--{name} goes with {' or '.join(commands.split())}, not with {what}")
        given[name] = default if given[name] is None else given[name]
    given["part"] = given["part"] or ("all" if what == "tsne" else "test")
    try:
        if what == "tsne":
            given["out"] = given["out"] or str(Path(given["folders"][0]) / "tsne.png")
            if given["images"] < 4:
                raise Stop(f"--images is {given['images']}; it must be at least 4", 2)
        if not 0 <= given["flops"] < float("inf"):
            raise Stop(f"--flops is {given['flops']}; it must be a finite number, at least 0", 2)
        if what == "cost" and not 0 < given["accuracy"] <= 1:
            raise Stop(f"--accuracy is {given['accuracy']}; it must be above 0 and at most 1, such as 0.6", 2)
        if given["batches"] < 1:
            raise Stop(f"--batches is {given['batches']}; it must be at least 1", 2)
        if what == "pad" and given["out"] and len(given["folders"]) != 2:
            raise Stop(f"--out of pad draws one run against another: give two folders, not {len(given['folders'])}", 2)
        if given["out"]:
            figure_format(given["out"])  # before minutes of work, not after
        found = SHOW[what](given)
        if given["json"]:
            write_json(Path(given["json"]), found)
        return
    except (Stop, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as e:
        message, code = ending(e, "the runs are as they were")
    print(f"measures: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
