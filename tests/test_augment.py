"""Augmentation: every operation, the whole chain and the distributions against torchvision's."""

import math

import plumbing.augment
from plumbing.augment import (
    AUGMENTATIONS,
    Augmentation,
    augment,
    brightness,
    contrast,
    draw,
    hue,
    resample,
    saturation,
    taps,
)

import pytest
import torch
from torch import Tensor, tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

FACTORS = [0.0, 0.2, 0.7, 1.0, 1.3, 1.8]
TURNS = [-0.5, -0.2, 0.0, 0.1, 0.37, 0.5]
ADJUST = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
BOX = ("top", "left", "height", "width")
EVERYTHING = Augmentation(
    scale=(0.08, 1), flip=0.5, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.5, jitter=0.8, gray=0.3
)
SETTINGS = {
    **AUGMENTATIONS,
    "everything": EVERYTHING,
    "smaller": Augmentation(size=11, scale=(0.5, 1), flip=1),
}


def images(n: int, C: int = 3, H: int = 24, W: int = 24) -> Tensor:
    x = torch.rand(n, C, H, W, generator=torch.Generator().manual_seed(5))
    x[:, :, :4] = x[:, :1, :4]  # grey pixels
    x[:, :, 4:8] = (2 * x[:, :, 4:8]).round() / 2  # channels that tie, black and white
    return x.contiguous(memory_format=torch.channels_last)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert a.shape == b.shape
    difference = (a - b).abs().max()
    assert difference < tolerance, f"differ by up to {difference:.1e}"


def seeded(seed: int, x: Tensor, how: Augmentation) -> Tensor:
    torch.manual_seed(seed)
    return augment(x, how)


# The operations


def by_torchvision(x: Tensor, p: dict[str, Tensor], how: Augmentation) -> Tensor:
    """The parameters `p` of `draw`, applied to one image after the other by torchvision's functions."""
    size = [how.size or x.shape[2], how.size or x.shape[3]]
    out = []
    for b, image in enumerate(x):
        box = [int(p[side][b]) for side in BOX]
        image = tv.resized_crop(image, *box, size, antialias=True)
        if p["flip"][b]:
            image = tv.horizontal_flip(image)
        for k in p["order"][b].tolist():
            if k >= 0:
                image = ADJUST[k](image, p["factors"][b, k].item())
        if p["gray"][b] and len(image) == 3:
            image = tv.rgb_to_grayscale(image, 3)
        out.append(image)
    return torch.stack(out)


@pytest.mark.parametrize("operation, theirs, factors, C", [
    (brightness, tv.adjust_brightness, FACTORS, 1),
    (brightness, tv.adjust_brightness, FACTORS, 3),
    (contrast, tv.adjust_contrast, FACTORS, 1),
    (contrast, tv.adjust_contrast, FACTORS, 3),
    (saturation, tv.adjust_saturation, FACTORS, 3),
    (hue, tv.adjust_hue, TURNS, 3)])
def test_each_colour_operation_is_torchvisions(operation, theirs, factors, C):
    x = images(len(factors), C)
    expected = torch.stack([theirs(image, f) for image, f in zip(x, factors)])
    close(operation(x.clone(), tensor(factors)[:, None, None, None]), expected, 2e-6)


@pytest.mark.parametrize("H, W, h, w", [(40, 30, 40, 30), (40, 30, 24, 24), (40, 30, 57, 57), (64, 64, 7, 7)])
def test_crop_is_torchvisions_antialiased_resized_crop(H, W, h, w):
    """Smaller, larger and equal output; crops of one pixel, of the whole image and between."""
    boxes = tensor([[0, 0, H, W], [3, 5, 1, 1], [H - 4, W - 9, 4, 9], [2, 1, 20, 13], [0, 7, H, 20]])
    x = images(len(boxes), 3, H, W)
    expected = []
    for image, box in zip(x, boxes.tolist()):
        expected.append(tv.resized_crop(image, *box, [h, w], antialias=True))
    top, left, height, width = boxes.T
    rows, a = taps(top, height, H, h)
    columns, b = taps(left, width, W, w)
    close(resample(x, rows, a, columns, b).mT, torch.stack(expected), 5e-6)  # the weights are float32


# The whole chain


@pytest.mark.parametrize("C", [1, 3])
@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_the_whole_chain_is_torchvisions(how, C):
    """Against torchvision's transforms, image by image, with the same draws."""
    x = images(48, C, 26, 22)
    y = seeded(3, x, how)
    torch.manual_seed(3)
    p = draw(48, 26, 22, how)
    close(y, by_torchvision(x, p, how), 2e-5)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, images(48, C, 26, 22))  # left as it is


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("how", [EVERYTHING, Augmentation(size=11, scale=(0.08, 1))], ids=["all", "crops"])
def test_range_survives_extreme_pixels(how, value):
    """Without clamping the crops alone would be above 1, as the float32 weights are after rounding."""
    y = seeded(3, torch.full((64, 3, 64, 64), value), how)
    assert y.isfinite().all()
    assert y.min() >= 0
    assert y.max() <= 1


@pytest.mark.parametrize("piece", [5000, 10 ** 9])
def test_pieces_change_nothing(monkeypatch, piece):
    """On a CPU a batch is augmented in pieces, on a GPU at once."""
    monkeypatch.setattr(plumbing.augment, "PIECE", 1)
    one_by_one = seeded(2, images(10), EVERYTHING)
    monkeypatch.setattr(plumbing.augment, "PIECE", piece)
    close(seeded(2, images(10), EVERYTHING), one_by_one, 1e-6)


def test_parameters_do_not_depend_on_the_device():
    """Nothing but `draw` draws: another device leaves the CPU's generator as the CPU does."""
    seeded(4, images(8), EVERYTHING)
    on_cpu = torch.get_rng_state()
    seeded(4, images(8).to("meta"), EVERYTHING)
    elsewhere = torch.get_rng_state()
    torch.manual_seed(4)
    before = torch.get_rng_state()
    draw(8, 24, 24, EVERYTHING)
    assert torch.equal(on_cpu, elsewhere) and torch.equal(on_cpu, torch.get_rng_state())
    assert not torch.equal(on_cpu, before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_gpu_equals_cpu(how):
    x = images(64, 3, 40, 40)
    y = seeded(4, x.cuda(), how)
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(y.cpu(), seeded(4, x, how), 2e-5)


# The distributions


def crops_of_torchvision(n: int, H: int, W: int, scale: tuple[float, float]) -> dict[str, Tensor]:
    transform = v2.RandomResizedCrop(32, scale=scale)
    crops = [transform.make_params([torch.empty(3, H, W)]) for _ in range(n)]
    return {side: tensor([crop[side] for crop in crops]) for side in BOX}


def distance(a: Tensor, b: Tensor) -> float:
    """The largest distance of the distribution functions of two samples (Kolmogorov and Smirnov's)."""
    a, b = a.sort().values, b.sort().values
    both = torch.cat([a, b])
    below_a = torch.searchsorted(a, both, right=True) / len(a)
    below_b = torch.searchsorted(b, both, right=True) / len(b)
    return float((below_a - below_b).abs().max())


def quantities(p: dict[str, Tensor], H: int, W: int) -> dict[str, Tensor]:
    """What is compared of crops."""
    return {
        "area": p["height"] * p["width"],
        "ratio": p["width"] / p["height"],
        "place": p["left"] / W - p["top"] / H,
    }


@pytest.mark.parametrize("H, W, scale", [(32, 32, (0.08, 1)), (40, 60, (0.5, 1))])
def test_crops_are_distributed_as_torchvisions(H, W, scale):
    """The distance of two samples of n is below 1.95 sqrt(2 / n) in 999 of 1,000 pairs from one distribution.
    Sides are whole pixels, so quantiles would jump."""
    n = 6000
    torch.manual_seed(0)
    ours = quantities(draw(n, H, W, Augmentation(scale=scale)), H, W)
    theirs = quantities(crops_of_torchvision(n, H, W, scale), H, W)
    for name in ours:
        assert distance(ours[name], theirs[name]) < 1.95 * math.sqrt(2 / n), name


@pytest.mark.parametrize("H, W", [(20, 60), (60, 20)])
def test_central_crop_where_no_try_fits(H, W):
    ours = draw(50, H, W, Augmentation(scale=(0.9, 1)))
    theirs = crops_of_torchvision(50, H, W, (0.9, 1))
    for side in BOX:
        assert torch.equal(ours[side], theirs[side]), side


N = 20_000


def error(share: float) -> float:
    """Four standard deviations of a frequency in N draws."""
    return 4 * math.sqrt(share * (1 - share) / N)


def simclr() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return draw(N, 8, 8, AUGMENTATIONS["simclr"])


def test_frequencies():
    p = simclr()
    jittered = p["order"][:, 0] >= 0
    for values, share in ((p["flip"], 0.5), (p["gray"], 0.2), (jittered, 0.8)):
        frequency = values.double().mean()
        assert abs(frequency - share) < error(share)


@pytest.mark.parametrize("k, low, high", [(0, 0.2, 1.8), (1, 0.2, 1.8), (2, 0.2, 1.8), (3, -0.2, 0.2)])
def test_factors_are_uniform(k, low, high):
    f = (simclr()["factors"][:, k] - low) / (high - low)
    shares = torch.linspace(0, 1, 11)
    differences = f.quantile(shares) - shares
    assert f.min() >= 0
    assert f.max() <= 1
    assert differences.abs().max() < 0.02
