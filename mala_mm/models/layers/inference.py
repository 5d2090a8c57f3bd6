"""Short cuts of inference on the CPU: what oneDNN fuses, in pieces that stay in the cache.

PyTorch's own compiler fuses by the operators of ``torch.ops.mkldnn``; here they are called where
nobody watches the operations one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from mala_mm.ops.fused.library import is_plain_call

# Elements of a map that stays in the third-level cache. It is also below the 32 MiB from which on
# the C library asks the system for fresh pages at every allocation.
BAND_ELEMENTS = 1 << 22


def takes_short_cuts(x: Tensor, *modules: nn.Module) -> bool:
    """Whether ``x`` and the modules may be computed by this file's functions.

    On the CPU, in float32 or in bfloat16 where the processor multiplies it, while no gradients are
    recorded, no compiler, tracer or dispatch mode looks on, and no hook waits for a module's call.
    """
    if x.device.type != 'cpu' or torch.is_grad_enabled() or not torch._C._get_mkldnn_enabled():
        return False
    dtype = compute_dtype(x)
    return (
        (dtype == torch.float32 or (dtype == torch.bfloat16 and _has_bfloat16()))
        and is_plain_call(x)
        and not torch.compiler.is_exporting()
        and not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    )


def _has_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which a convolution of ``x`` is computed."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    gelu: bool = False,
) -> Tensor:
    """``Conv2d(x)`` or ``gelu(Conv2d(x))`` in one operation, in the type of autocast."""
    x, weight, bias = _cast(x, weight, bias)
    after = ('gelu', [], 'none') if gelu else ('none', [], '')
    return torch.ops.mkldnn._convolution_pointwise(
        x, weight, bias, padding, stride, (1, 1), 1, *after
    )


def add_pointwise(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """``out += Conv1x1(x)`` in one operation."""
    x, weight, bias = _cast(x, weight, bias)
    if out.dtype != x.dtype:
        out.add_(torch.conv2d(x, weight, bias))
        return
    torch.ops.mkldnn._convolution_pointwise_.binary(
        *(out, x, weight, bias, (0, 0), (1, 1), (1, 1), 1, 'add', 1.0, None, [], None)
    )


def _cast(x: Tensor, *weights: Tensor) -> Iterator[Tensor]:
    dtype = compute_dtype(x)
    return (t.to(dtype) for t in (x, *weights))


def convolve_all(layers: nn.Sequential, x: Tensor) -> Tensor:
    """Compute convolutions, each with the BatchNorm and the GELU behind it."""
    layers = list(layers)
    while layers:
        conv = layers.pop(0)
        weight, bias = conv.weight, conv.bias
        while layers and isinstance(layers[0], (_BatchNorm, nn.Identity)):
            norm = layers.pop(0)
            if isinstance(norm, _BatchNorm):
                weight, bias = fuse_conv_bn_weights(
                    *(weight, bias, norm.running_mean, norm.running_var),
                    *(norm.eps, norm.weight, norm.bias),
                )
        gelu = bool(layers) and isinstance(layers[0], nn.GELU)
        if gelu:
            layers.pop(0)
        x = convolve(x, weight, bias, conv.stride, conv.padding, gelu)
    return x


def can_convolve_all(layers: nn.Sequential, x: Tensor) -> bool:
    """Whether :func:`convolve_all` knows these layers in the state in which they are."""
    known = (nn.Conv2d, nn.GELU, nn.Identity)
    return takes_short_cuts(x, layers, *layers) and all(
        type(m) in known or (isinstance(m, _BatchNorm) and not m.training and m.affine)
        for m in layers
    )


def bands(
    batch: int, height: int, elements: int, halo: int = 0
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Cut a batch of maps into images, or these into bands of rows, that stay in the cache.

    Args:
        batch (int): Number of images.
        height (int): Rows of a map.
        elements (int): Of the largest map of an image.
        halo (int): Rows on either side that a band's result depends on.

    Yields:
        tuple[slice, slice, slice, slice]: Images; rows; rows with their halo; where the former lie
        in the latter.
    """
    images = max(1, BAND_ELEMENTS // elements)
    rows = max(8, -(-height // -(-elements // BAND_ELEMENTS)))  # of one size: memory is used again
    for image in range(0, batch, images):
        for first in range(0, height, rows):
            last = min(first + rows, height)
            top = max(first - halo, 0)
            yield (
                slice(image, image + images),
                slice(first, last),
                slice(top, min(last + halo, height)),
                slice(first - top, last - top),
            )
