"""Augmentation: every operation, the whole chain and the distributions against torchvision's."""

import math

import plumbing.data.augment
from plumbing.data.augment import AUGMENTATIONS, Augmentation, augment, draw

import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor, tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

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
    monkeypatch.setattr(plumbing.data.augment, "PIECE", 1)
    one_by_one = seeded(2, images(10), EVERYTHING)
    monkeypatch.setattr(plumbing.data.augment, "PIECE", piece)
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


def quantities(p: dict[str, Tensor], H: int, W: int) -> dict[str, Tensor]:
    """What is compared of crops."""
    return {
        "area": p["height"] * p["width"],
        "ratio": p["width"] / p["height"],
        "place": p["left"] / W - p["top"] / H,
    }


@pytest.mark.parametrize("H, W, scale", [(32, 32, (0.08, 1)), (40, 60, (0.5, 1))])
def test_crops_are_distributed_as_torchvisions(H, W, scale):
    """By Kolmogorov and Smirnov's test. Sides are whole pixels, so quantiles would jump."""
    n = 6000
    torch.manual_seed(0)
    ours = quantities(draw(n, H, W, Augmentation(scale=scale)), H, W)
    theirs = quantities(crops_of_torchvision(n, H, W, scale), H, W)
    for name in ours:
        assert ks_2samp(ours[name], theirs[name]).pvalue > 0.001, name


@pytest.mark.parametrize("H, W", [(20, 60), (60, 20)])
def test_central_crop_where_no_try_fits(H, W):
    ours = draw(50, H, W, Augmentation(scale=(0.9, 1)))
    theirs = crops_of_torchvision(50, H, W, (0.9, 1))
    for side in BOX:
        assert torch.equal(ours[side], theirs[side]), side


# What a preset does to an image, as its source says: the share of the area that is kept, the ratio of the
# sides, how often it is mirrored; the ends of the factors of brightness, contrast and saturation, the largest
# turn of the hue, how often there are such changes, and how often there is grey.
PRESETS = {
    "fedsr": ((0.7, 1), (3 / 4, 4 / 3), 0.5, (0.7, 1.3), (0.7, 1.3), (0.7, 1.3), 0.3, 1, 0.1),
    "fedsr-crops": ((0.7, 1), (3 / 4, 4 / 3), 0, (1, 1), (1, 1), (1, 1), 0, 1, 0),
    "jigen": ((0.8, 1), (3 / 4, 4 / 3), 0.5, (1, 1), (1, 1), (1, 1), 0, 1, 0.1),
    "crops": ((0.4, 1), (4 / 5, 5 / 4), 0, (1, 1), (1, 1), (1, 1), 0, 1, 0),
    "simclr": ((0.08, 1), (3 / 4, 4 / 3), 0.5, (0.2, 1.8), (0.2, 1.8), (0.2, 1.8), 0.2, 0.8, 0.2),
}
N = 5000


def spans(values: Tensor, low: float, high: float) -> None:
    """The values go from end to end, uniformly."""
    slack = 0.01 * (high - low) + 1e-4
    assert low - slack < values.min() and values.max() < high + slack
    shares = tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    assert (values.quantile(shares) - low - (high - low) * shares).abs().max() < 4 * slack


def share(found: Tensor, expected: float) -> None:
    """To four standard deviations of a frequency."""
    slack = 4 * math.sqrt(expected * (1 - expected) / N)
    assert abs(float(found.double().mean()) - expected) <= slack


def test_each_image_has_an_order_of_its_changes():
    """All 24, as often as each other."""
    torch.manual_seed(2)
    orders, counts = draw(N, 8, 8, EVERYTHING)["order"].unique(dim=0, return_counts=True)
    jittered = counts[orders[:, 0] >= 0]
    assert len(jittered) == 24 and (jittered / (0.8 * N) - 1 / 24).abs().max() < 0.01


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_preset_draws_what_its_source_says(name):
    """With the same draws an image is changed as by torchvision: test_the_whole_chain_is_torchvisions."""
    area, ratio, flip, *factors, turn, jittered, gray = PRESETS[name]
    torch.manual_seed(1)
    p = draw(N, 640, 640, AUGMENTATIONS[name])
    kept = p["height"] * p["width"] / 640 ** 2
    assert abs(kept.min() - area[0]) < 0.015 and abs(kept.max() - area[1]) < 0.015
    if area[0] < 0.7:  # else few crops of the outermost ratios fit into the image
        ratios = p["width"] / p["height"]
        assert 0.97 < ratios.min() / ratio[0] < 1.03 and 0.97 < ratios.max() / ratio[1] < 1.03
    share(p["flip"], flip)
    share(p["order"][:, 0] >= 0, jittered)
    share(p["gray"], gray)
    for drawn, (low, high) in zip(p["factors"].T, (*factors, (-turn, turn)), strict=True):
        spans(drawn, low, high)
