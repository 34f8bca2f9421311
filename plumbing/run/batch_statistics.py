"""The statistics of a batch, with a gradient, as batch normalization takes them."""

from __future__ import annotations

import torch
from torch import Tensor


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    r"""x [B, T(, h, w)] -> mean [T] and biased variance [T] of each channel over batch and positions.

    $$ \begin{aligned}
       \mu_{k,b}^{(l)} &= \frac{1}{B}\sum_{i} \mathbb{X}_{k,b,i}^{(l)} \\
       \sigma_{k,b}^{(l)2} &= \frac{1}{B}\sum_{i} \left(\mathbb{X}_{k,b,i}^{(l)} - \mu_{k,b}^{(l)}\right)^2
       \end{aligned} \tag{4} $$

    torch.var_mean gives the same; with it a training step of FDSE takes 1.3 to 1.7 times as long
    (papers/fdse/differences.md).
    """
    return BatchStatistics.apply(x)  # Eq. (4)


class BatchStatistics(torch.autograd.Function):
    """The mean is the BN kernel's. The backward pass is one affine map of x, rounded to x's precision. In
    bf16 the variance's gradient loses digits where |mean| is far above the deviation; FDSE's x is fp32 unless
    --no-block-bias."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(x.dtype, torch.float32)
        ones = torch.ones(x.shape[1], dtype=exact, device=x.device)
        zeros = torch.zeros(x.shape[1], dtype=exact, device=x.device)
        _, mean, inverse_std = torch.native_batch_norm(x, ones, zeros, None, None, True, 0.0, 1e-8)
        ctx.save_for_backward(x, mean)
        return mean, (inverse_std ** -2 - 1e-8).clamp_min(0)  # epsilon 0: 1/std would be 0 for a dead channel

    @staticmethod
    def backward(ctx, grad_mean: Tensor, grad_variance: Tensor) -> Tensor:
        x, mean = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        slope = 2 * grad_variance / n  # d mean/d x = 1/n, d variance/d x = 2 (x - mean)/n
        offset = grad_mean / n - slope * mean
        offset, slope = per_channel(offset.to(x.dtype), x), per_channel(slope.to(x.dtype), x)
        return torch.addcmul(offset, x, slope)


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    """v [T] in the shape in which it goes with the channels of x [B, T(, h, w)]."""
    return v.view([-1] + [1] * (x.dim() - 2))
