"""Random crops, flips, colour jitter and greyscale for a whole batch on its device, each image by itself.

    x = augment(x, AUGMENTATIONS["fedsr"])      # x float32 [B, C, H, W] in [0, 1], before any normalization

Steps, distributions and formulas are those of torchvision's RandomResizedCrop (bilinear, antialias),
RandomHorizontalFlip, RandomApply of ColorJitter, and RandomGrayscale, in this order (test_augment.py
compares them). All parameters come from torch's CPU generator: a seed gives the same ones on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

GREY = (0.2989, 0.587, 0.114)  # the weights of red, green and blue in torchvision's grey
TRIES = 10  # crops that RandomResizedCrop draws before it takes the central one
PIECE = 2 ** 20  # pixel values augmented at a time on a CPU: what a piece needs stays in its cache


@dataclass(frozen=True)
class Augmentation:
    """What may happen to an image. A strength or probability of 0 switches its step off."""

    size: int | None = None  # height and width of the output; None: those of the input
    scale: tuple[float, float] = (1.0, 1.0)  # the crop's share of the area, uniform
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # the crop's width / height, log-uniform
    flip: float = 0.0  # probability
    brightness: float = 0.0  # s: a factor uniform in [max(0, 1 - s), 1 + s]
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # s: a turn uniform in [-s, s], at most 0.5
    jitter: float = 1.0  # probability that an image gets the four above, in a random order
    gray: float = 0.0  # probability


AUGMENTATIONS = {
    # FedSR (Nguyen et al., NeurIPS 2022), Sec. 4.2, names the steps and the 10%; the ranges are those of the
    # official code (atuannguyen/FedSR, src/datasets.py).
    "fedsr": Augmentation(scale=(0.7, 1.0), flip=0.5, brightness=0.3, contrast=0.3, saturation=0.3, hue=0.3,
                          gray=0.1),
    # Its crops alone: ours, for RotatedMNIST, whose digits have no colours and no mirror image.
    "fedsr-crops": Augmentation(scale=(0.7, 1.0)),
    # JiGen (Carlucci et al., CVPR 2019), the protocol of FedADG: crops that keep 80 to 100%, flips, grey 10%.
    # Its script run_PACS_photo.sh (fmcarlucci/JigenDG) also sets jitter 0.4, which the paper does not name.
    # JiGen draws the grey for each tile of its puzzle, here it is drawn for the image.
    "jigen": Augmentation(scale=(0.8, 1.0), flip=0.5, gray=0.1),
    # Ours, for the small digits, which have no colours; a flip would make another sign of a digit.
    "crops": Augmentation(scale=(0.4, 1.0), ratio=(0.8, 1.25)),
    # SimCLR (Chen et al., ICML 2020), App. A, which FedGaLA (App. B.1) follows. Scale and ratio are
    # RandomResizedCrop's defaults; no blur, as in SimCLR for small images.
    "simclr": Augmentation(scale=(0.08, 1.0), flip=0.5, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2,
                           jitter=0.8, gray=0.2),
}


@torch.no_grad()
def augment(x: Tensor, how: Augmentation) -> Tensor:
    """x float32 [B, C, H, W] in [0, 1], C = 1 or 3 -> the same of the size asked for, channels last.

    x is left as it is. On a CPU a few images are augmented at a time, on a GPU all.
    """
    B, C, H, W = x.shape
    h = how.size or H
    w = how.size or W
    p = draw(B, H, W, how)
    rows, a = taps(p["top"], p["height"], H, h)  # indices and weights [B, h, T]
    columns, b = taps(p["left"], p["width"], W, w)
    columns = flipped(columns, p["flip"])
    b = flipped(b, p["flip"])

    out = torch.empty(B, C, h, w, device=x.device, memory_format=torch.channels_last)
    n = max(1, PIECE // (C * h * w)) if x.device.type == "cpu" else B
    for begin in range(0, B, n):
        piece = slice(begin, begin + n)
        z = resample(x[piece], *(v[piece].to(x.device) for v in (rows, a, columns, b)))
        jitter(z, p["order"][piece], p["factors"][piece], how)
        if C == 3:
            gray = p["gray"][piece].nonzero()[:, 0].to(x.device)
            z.index_copy_(0, gray, grey(z.index_select(0, gray)).expand(-1, 3, -1, -1))
        out[piece] = z.mT
    return out


# Parameters


def uniform(low: float, high: float, *shape: int) -> Tensor:
    """In float64, so that a product with an integer n never rounds up to n."""
    return low + (high - low) * torch.rand(*shape, dtype=torch.float64)


def draw(B: int, H: int, W: int, how: Augmentation) -> dict[str, Tensor]:
    """The parameters of B images of H x W, on the CPU.

    top, left, height, width int64 [B]; flip, gray bool [B]; for the jitter order int64 [B, 4] (which
    operation comes 1st, 2nd, ..; -1 for none) and factors float32 [B, 4] (of brightness, contrast,
    saturation, hue).
    """
    top, left, height, width = crops(B, H, W, how)
    flip = uniform(0, 1, B) < how.flip
    order = torch.rand(B, 4).argsort(1)
    order[uniform(0, 1, B) >= how.jitter] = -1
    factors = []
    for s in (how.brightness, how.contrast, how.saturation):
        factors.append(uniform(max(0, 1 - s), 1 + s, B))
    factors.append(uniform(-how.hue, how.hue, B))
    gray = uniform(0, 1, B) < how.gray
    return {"top": top, "left": left, "height": height, "width": width, "flip": flip, "order": order,
            "factors": torch.stack(factors, 1).float(), "gray": gray}


def crops(B: int, H: int, W: int, how: Augmentation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RandomResizedCrop's top, left, height, width, int64 [B].

    The first of ten tries that fits into the image, else the largest central crop whose ratio is allowed.
    """
    narrow, wide = how.ratio
    area = H * W * uniform(*how.scale, TRIES, B)
    log_ratio = uniform(math.log(narrow), math.log(wide), TRIES, B)
    ratio = log_ratio.exp()
    width = (area * ratio).sqrt().round().long()
    height = (area / ratio).sqrt().round().long()
    fits = (width > 0) & (width <= W)
    fits &= (height > 0) & (height <= H)
    first = fits.int().argmax(0, keepdim=True)  # of equal values argmax takes the first
    height = height.gather(0, first)[0]
    width = width.gather(0, first)[0]
    none = ~fits.any(0)
    height[none] = min(H, round(W / narrow))
    width[none] = min(W, round(H * wide))

    u, v = uniform(0, 1, 2, B)
    spare_rows = H - height
    spare_columns = W - width
    top = torch.where(none, spare_rows // 2, (u * (spare_rows + 1)).long())
    left = torch.where(none, spare_columns // 2, (v * (spare_columns + 1)).long())
    return top, left, height, width


# Crop and resize


def taps(start: Tensor, length: Tensor, n: int, out: int) -> tuple[Tensor, Tensor]:
    """Resizing pixels start .. start + length - 1 [B] of n to `out`: of which pixels each output pixel is the
    sum, int64 [B, out, T], and their weights, float32 [B, out, T].

    The weight is a triangle around the output pixel's centre, as wide as the larger of a pixel of the input
    and of the output (antialias), cut at the crop's border and scaled to sum 1. T is the most pixels that any
    crop needs: 2 if none is made smaller.
    """
    start = start[:, None, None]
    length = length[:, None, None]
    step = length / out
    radius = step.double().clamp(min=1)
    pixel = torch.arange(out, dtype=torch.float64)[:, None]
    centre = step * (pixel + 0.5)
    T = math.ceil(2 * max(n / out, 1))
    first = (centre - radius - 0.5).floor() + 1
    i = first + torch.arange(T)
    inside = (i >= 0) & (i < length)
    distance = (i + 0.5 - centre).abs()
    weight = (1 - distance / radius).clamp(min=0) * inside
    weight = weight / weight.sum(2, keepdim=True)
    i = i.clamp(min=0).minimum(length - 1)
    return (start + i).long(), weight.float()


def flipped(v: Tensor, flip: Tensor) -> Tensor:
    """v [B, w, T], its w reversed for the images in flip [B]."""
    return torch.where(flip[:, None, None], v.flip(1), v)


def resample(x: Tensor, rows: Tensor, a: Tensor, columns: Tensor, b: Tensor) -> Tensor:
    """x [B, C, H, W] -> [B, C, w, h], the resized crops with rows and columns exchanged, contiguous.

    Rows and then columns are mixed by embedding_bag, a weighted sum of few rows of a matrix: on two cores up
    to 4 times faster than products with the full matrices of weights. With the exchange both mix contiguous
    memory, first W * C values at a time and then h. `augment` exchanges at the end.
    """
    B, C, H, W = x.shape
    h, w = rows.shape[1], columns.shape[1]
    image = torch.arange(B, device=x.device).view(B, 1, 1)
    row = image * H + rows  # [B, h, T]
    z = x.permute(0, 2, 3, 1)  # [B, H, W, C]
    z = mix(z.reshape(B * H, W * C), row, a)

    plane = torch.arange(B * C, device=x.device).view(B, C, 1, 1)
    column = plane * W + columns[:, None]  # [B, C, w, T]
    b = b[:, None].expand(-1, C, -1, -1)
    z = z.view(B, h, W, C).permute(0, 3, 2, 1)  # [B, C, W, h]
    z = mix(z.reshape(B * C * W, h), column, b)
    z = z.view(B, C, w, h)
    return z.clamp_(0, 1)  # the weights' sum is 1 up to rounding


def mix(x: Tensor, i: Tensor, weight: Tensor) -> Tensor:
    """x [N, D], i and weight [..., T] -> [M, D]: each row the sum over T of weight * x[i]."""
    T = i.shape[-1]
    i = i.reshape(-1, T)
    weight = weight.reshape(-1, T)
    return embedding_bag(i, x, per_sample_weights=weight, mode="sum")


# Colour: z [n, C, ., .] in [0, 1] and a factor f [n] for each image; all but grey write into z


def jitter(z: Tensor, order: Tensor, factors: Tensor, how: Augmentation) -> None:
    """ColorJitter of n images, in place: in each of four turns every image has the operation that its order
    [n, 4] names, with its factor [n, 4]. One channel has neither saturation nor hue."""
    strengths = (how.brightness, how.contrast, how.saturation, how.hue)[:None if z.shape[1] == 3 else 2]
    operations = [(k, (brightness, contrast, saturation, hue)[k]) for k, s in enumerate(strengths) if s]
    for turn in order.T:
        for k, operation in operations:
            part = (turn == k).nonzero()[:, 0]
            f = factors[part, k].to(z.device)
            part = part.to(z.device)
            if len(part):
                changed = operation(z.index_select(0, part), f[:, None, None, None])
                z.index_copy_(0, part, changed)


def brightness(z: Tensor, f: Tensor) -> Tensor:
    return z.mul_(f).clamp_(0, 1)


def contrast(z: Tensor, f: Tensor) -> Tensor:
    """Away from (f > 1) or towards the image's mean grey."""
    mean = z.mean((2, 3), keepdim=True)
    if z.shape[1] == 3:
        mean = grey(mean)
    return z.mul_(f).add_((1 - f) * mean).clamp_(0, 1)


def saturation(z: Tensor, f: Tensor) -> Tensor:
    """Away from (f > 1) or towards each pixel's grey."""
    pixel = grey(z).mul_(1 - f)
    return z.mul_(f).add_(pixel).clamp_(0, 1)


def grey(z: Tensor) -> Tensor:
    """[n, 3, ., .] -> [n, 1, ., .]."""
    r, g, b = z.split(1, 1)
    return (r * GREY[0]).add_(g, alpha=GREY[1]).add_(b, alpha=GREY[2])


def hue(z: Tensor, f: Tensor) -> Tensor:
    """Turn each pixel's hue by f of the circle, HSV's saturation and value staying as they are.

    The circle has six parts: red is at 0, green at 2, blue at 4. A channel is at the pixel's maximum within 1
    of its own place, at the minimum beyond 2, and linear between.
    """
    r, g, b = z.split(1, 1)
    high = torch.maximum(torch.maximum(r, g), b)
    span = high - torch.minimum(torch.minimum(r, g), b)
    # Masks of 0 and 1 as numbers, and lerp with them (exact): on a CPU ten times faster than torch.where.
    red = high.clone().eq_(r)  # where red is the largest
    green = high.clone().eq_(g)
    h = torch.lerp(r - g, b - r, green)
    h.lerp_(g - b, red)
    h.div_(span.clamp(min=1e-12))  # from the largest channel's place, in [-1, 1]; 0 where the pixel is grey
    place = green.mul_(-2).add_(4).mul_(1 - red)  # the largest channel's
    h.add_(place)
    h.add_(6 * f)
    h.sub_((h / 6).floor_(), alpha=6)  # in [0, 6]
    # How far a channel is below the maximum, as a share of the span; red has its place at 0 and at 6.
    r.copy_(h).sub_(3).abs_().neg_().add_(2)
    g.copy_(h).sub_(2).abs_().sub_(1)
    b.copy_(h).sub_(4).abs_().sub_(1)
    return z.clamp_(0, 1).mul_(span.neg_()).add_(high)
