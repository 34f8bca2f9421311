"""Local training in plain torch and float64, for tests that recompute whole rounds: a forward pass of the
digits' network from a dict of tensors, and a step of SGD. Nothing of common.py or of a method file is in
it."""

import re

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, conv2d, max_pool2d

State = dict[str, Tensor]


def in_double(state: State) -> State:
    """A copy in float64, in which BN's counters are numbers like all others."""
    return {name: v.double() for name, v in state.items()}


def is_trained(name: str) -> bool:
    """Whether an entry of a state is a parameter; the others are statistics of BN or of FedFA's layers."""
    return not re.search("running|num_batches|mean_|spread_", name)


def leaves_of(state: State) -> State:
    """The parameters, to be differentiated by."""
    return {name: v.clone().requires_grad_() for name, v in state.items() if is_trained(name)}


def batch_norm(h: Tensor, leaves: State, state: State, name: str) -> Tensor:
    """BN over all axes but the second, with the statistics of the batch; the running ones in `state` move by
    a tenth, the variance divided by n - 1."""
    axes = [axis for axis in range(h.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(h.dim())]
    n = h.numel() // h.shape[1]
    mean = h.mean(axes)
    var = (h - mean.view(shape)).square().mean(axes)
    running = {"mean": mean.detach(), "var": var.detach() * n / (n - 1)}
    for what, new in running.items():
        state[f"{name}.running_{what}"] = 0.9 * state[f"{name}.running_{what}"] + 0.1 * new
    state[f"{name}.num_batches_tracked"] = state[f"{name}.num_batches_tracked"] + 1
    normal = (h - mean.view(shape)) / (var.view(shape) + 1e-5).sqrt()
    return normal * leaves[f"{name}.weight"].view(shape) + leaves[f"{name}.bias"].view(shape)


def linear(z: Tensor, leaves: State, name: str) -> Tensor:
    return z @ leaves[f"{name}.weight"].T + leaves[f"{name}.bias"]


def conv(w: State, name: str, x: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    return conv2d(x, w[f"{name}.weight"], w.get(f"{name}.bias"), stride, padding)


def batch_norm_at_rest(w: State, name: str, x: Tensor) -> Tensor:
    """BN with the running statistics."""
    def of(what: str) -> Tensor:
        return w[f"{name}.{what}"].view(-1, *[1] * (x.dim() - 2))
    return (x - of("running_mean")) / (of("running_var") + 1e-5).sqrt() * of("weight") + of("bias")


def body_of_smallcnn_bn(x: Tensor, leaves: State, state: State) -> Tensor:
    """z [B, 64] of the network of the digits, in training: two blocks of convolution, BN, ReLU and pooling,
    and a linear layer with a ReLU."""
    for c in (0, 4):
        x = batch_norm(conv(leaves, f"body.{c}", x, padding=1), leaves, state, f"body.{c + 1}")
        x = max_pool2d(x.clamp(min=0), 2)
    return linear(adaptive_avg_pool2d(x, 7).flatten(1), leaves, "body.10").clamp(min=0)


def body_in_evaluation(w: State, x: Tensor) -> Tensor:
    """The same z with the running statistics."""
    for c in (0, 4):
        x = batch_norm_at_rest(w, f"body.{c + 1}", conv(w, f"body.{c}", x, padding=1))
        x = max_pool2d(x.clamp(min=0), 2)
    return linear(adaptive_avg_pool2d(x, 7).flatten(1), w, "body.10").clamp(min=0)


def dse_block(w: State, name: str, x: Tensor, norm, padding: int = 0, stride: int = 1) -> Tensor:
    """FDSE's Eqs. (2)-(3) without the last ReLU, channel by channel, of maps [B, S, h, w], features [B, S] or
    tokens [B, N, S]. `norm(name, h)` is a BN."""
    tokens, maps = x.dim() == 3, x.dim() == 4
    h = conv(w, f"{name}.dfe", x, stride, padding) if maps else linear(x, w, f"{name}.dfe")
    h = norm(f"{name}.bn_dse", h.mT if tokens else h).clamp(min=0)
    kernels, parts = w[f"{name}.dse.weight"], [h]
    filters = len(kernels) // h.shape[1]  # of each channel
    for i, kernel in enumerate(kernels):
        channel = h[:, i // filters:i // filters + 1]
        part = conv2d(channel, kernel[None], padding=1) if maps else channel * kernel[0]
        if f"{name}.dse.bias" in w:
            part = part + w[f"{name}.dse.bias"][i]
        parts.append(part)
    out = torch.cat(parts, 1)[:, :len(w[f"{name}.bn_dfe.weight"])]
    if f"{name}.bias" in w:
        out = out + w[f"{name}.bias"].view(-1, *[1] * (h.dim() - 2))
    out = norm(f"{name}.bn_dfe", out)
    return out.mT if tokens else out


def log_probability(logits: Tensor, y: Tensor) -> Tensor:
    """log of the softmax at the labels y [B], of logits [B, C] -> [B]."""
    return logits[range(len(y)), y] - logits.exp().sum(1).log()


class ClippedSGD:
    """Steps of SGD with momentum and weight decay on a state; `norms` has the gradients' before they are
    clipped to `clip`."""

    def __init__(self, lr: float, momentum: float, decay: float, clip: float):
        self.lr, self.momentum, self.decay, self.clip = lr, momentum, decay, clip
        self.velocity = {}
        self.norms = []

    def step(self, objective: Tensor, leaves: State, state: State) -> None:
        gradients = dict(zip(leaves, torch.autograd.grad(objective, list(leaves.values()))))
        norm = sum(g.square().sum() for g in gradients.values()).sqrt()
        self.norms.append(float(norm))
        for name, g in gradients.items():
            g = g * min(1, self.clip / float(norm)) + self.decay * state[name]
            state[name] = state[name] - self.lr * self.direction(name, g)

    def direction(self, name: str, g: Tensor) -> Tensor:
        self.velocity[name] = self.momentum * self.velocity.get(name, 0) + g
        return self.velocity[name]


def adam_step(moments: dict, name: str, g: Tensor) -> Tensor:
    """Adam's step along the gradient g, at the rate 1; `moments` has both means and the number of steps."""
    m, v, s = moments.get(name, (0, 0, 0))
    m, v, s = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g ** 2, s + 1
    moments[name] = m, v, s
    return (m / (1 - 0.9 ** s)) / ((v / (1 - 0.999 ** s)).sqrt() + 1e-8)


def generated(code: Tensor, leaves: State, state: State, training: bool) -> Tensor:
    """z of FedCiR's and FedGen's generator from noise and label; in training BN's running statistics move."""
    h = code @ leaves["first.weight"].T
    if training:
        h = batch_norm(h, leaves, state, "bn")
    else:
        h = batch_norm_at_rest(state | leaves, "bn", h)
    return linear(h.clamp(min=0), leaves, "second")
