"""mmpretrain's vision transformers with another attention: hosts of the papers' comparisons.

Nothing of mmpretrain is copied: a backbone is built as it builds it, and in the chosen stages its
attention modules hand their projections over to :class:`TokenAttention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import MODELS as MMENGINE_MODELS
from torch import Tensor, nn

from mala_mm.ops import OPERATORS, Operator, build_operator
from mala_mm.ops.registry import merge_heads, split_heads
from mala_mm.registry import MODELS

from .backbones.arguments import parse_attn_cfg

HOSTS = ('SwinTransformer', 'VisionTransformer')
"""The backbones of mmpretrain whose attention can be replaced."""


class Grid:
    """The size of the map at this moment, for modules that are handed the tokens alone."""

    size: tuple[int, int] = (0, 0)

    def note_output(self, module: nn.Module, args: tuple, output: tuple) -> None:
        """As a forward hook: the size is the second of what a module returns."""
        self.size = tuple(output[1])

    def note_input(self, module: nn.Module, args: tuple) -> None:
        """As a forward pre-hook: the size is the second of what a module is given."""
        self.size = tuple(args[1])


class TokenConv(nn.Conv2d):
    """A depthwise convolution of the tokens of a map; tokens before them pass it by.

    Args:
        channels (int): Number of channels C.
        kernel_size (int): Taps in each direction, odd.
        grid (Grid): Knows the size of the map.
    """

    def __init__(self, channels: int, kernel_size: int, grid: Grid) -> None:
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, extra + H * W, C) to the same; the first ``extra`` tokens stay as they are."""
        extra = x.shape[1] - self.grid.size[0] * self.grid.size[1]
        tokens = merge_heads(x[:, None, extra:], self.grid.size, token_major=True)
        tokens = split_heads(super().forward(tokens), 1)[:, 0]
        return torch.cat([x[:, :extra], tokens], 1) if extra else tokens


class TokenAttention(BaseModule):
    """An operator between the projections of a host's attention module.

    ``q, k, v = qkv(x); y = operator(q, k, v); y = y + DWConv5x5(v); y = y * gate(x); proj(y)``, the
    convolution and the gate where they are asked for.

    Args:
        qkv (nn.Linear): The host's projection, C to 3C.
        operator (Operator): The operator; its heads are the host's.
        proj (nn.Linear): The host's projection of the output.
        drop (nn.Module): What the host does with the result: dropout, layer scale, drop path.
        grid (Grid): Knows the size of the map.
        lepe (bool): Whether to add MALA's local position, a 5x5 depthwise convolution of v.
        gate (bool): Whether to multiply with a further projection of the input, as MALA's mixer.
    """

    def __init__(
        self,
        qkv: nn.Linear,
        operator: Operator,
        proj: nn.Linear,
        drop: nn.Module,
        grid: Grid,
        lepe: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        channels = qkv.in_features
        self.qkv, self.operator, self.proj, self.drop, self.grid = qkv, operator, proj, drop, grid
        self.lepe = TokenConv(channels, 5, grid) if lepe else None
        self.gate = nn.Linear(channels, channels) if gate else None

    def forward(self, x: Tensor, hw_shape: Sequence[int] | None = None) -> Tensor:
        """Attend.

        Args:
            x (Tensor): Tokens of shape (B, extra + H * W, C).
            hw_shape (Sequence[int], optional): The size of the map, which the grid knows too.

        Returns:
            Tensor: As ``x``.
        """
        heads, extra = self.operator.num_heads, self.operator.num_extra_tokens
        q, k, v = self.qkv(x).unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.operator(q, k, v, self.grid.size, x.mT).transpose(1, 2).flatten(2)
        if self.lepe is not None:
            v = v.transpose(1, 2).flatten(2)[:, extra:]
            y = y + F.pad(self.lepe(v), (0, 0, extra, 0))
        if self.gate is not None:
            y = y * self.gate(x)
        return self.drop(self.proj(y))


@MODELS.register_module('ReplaceAttention')
def replace_attention(
    host: str,
    attn_types: str | Sequence[str | None],
    attn_cfg: dict | None = None,
    lepe: bool = False,
    gate: bool = False,
    **host_cfg,
) -> nn.Module:
    """Build a backbone of mmpretrain with other attention in some of its stages.

    In a config ``type='mala_mm.ReplaceAttention'``, beside the keywords of the host. Replaced
    stages attend to the whole map: no windows, no shift, no relative position. An operator's
    convolutions and positions act on the tokens of the map alone, a class token bypasses them and
    takes part in the rest. An operator whose paper puts a convolution into the feed-forward network
    (``local_ffn``) gets it.

    Args:
        host (str): ``'VisionTransformer'`` or ``'SwinTransformer'``.
        attn_types (str | Sequence[str | None]): The operator of each stage (Swin) or layer (ViT),
            one of :data:`mala_mm.ops.OPERATORS`, None to leave the host's own; or one for all.
        attn_cfg (dict, optional): Options of the operators; each takes those that it has. Other
            than in MAViT ``rotary`` is off unless set: the hosts have position embeddings of their
            own. ``grid`` follows from the host's ``img_size``.
        lepe (bool): Whether to add MALA's local position, see :class:`TokenAttention`.
        gate (bool): Whether to add its gate.
        **host_cfg: Keywords of the host.

    Returns:
        nn.Module: The host itself.

    Raises:
        ValueError: If the host, an operator or an option is unknown, or they do not fit together.
    """
    if host not in HOSTS:
        raise ValueError(f'host must be one of {HOSTS}, got {host!r}')
    for name, flag in (('lepe', lepe), ('gate', gate)):
        if not isinstance(flag, bool):
            raise ValueError(f'{name} must be True or False, got {flag!r}')
    model = MMENGINE_MODELS.build(dict(type=f'mmpretrain.{host}', **host_cfg))
    stages = _blocks(model, host)
    names = _parse_types(attn_types, len(stages), host)
    options = parse_attn_cfg(attn_cfg, [name for name in names if name])
    options = iter(options)
    for name, (size, blocks) in zip(names, stages):
        if name is None:
            continue
        cfg = next(options)
        known = OPERATORS[name].option_names()
        if 'rotary' in known:
            cfg.setdefault('rotary', False)
        if 'grid' in known:
            cfg.setdefault('grid', size)
        for block, grid in blocks:
            _replace(block, grid, name, cfg, lepe, gate, getattr(model, 'cls_token', None))
    return model


def _parse_types(attn_types: object, number: int, host: str) -> tuple[str | None, ...]:
    """Return the operator of each stage."""
    names = [attn_types] * number if isinstance(attn_types, str) else attn_types
    if (
        not isinstance(names, Sequence)
        or len(names) != number
        or any(name is not None and name not in OPERATORS for name in names)
    ):
        raise ValueError(
            f'attn_types of this {host} must be one operator or {number}, each one of '
            f"{tuple(OPERATORS)} or None for the host's own attention, got {attn_types!r}"
        )
    return tuple(names)


def _blocks(model: nn.Module, host: str) -> list[tuple[tuple[int, int], list]]:
    """Return, for each stage, the size of its map in training, and its blocks with their grids."""
    height, width = model.patch_embed.init_out_size
    if host == 'VisionTransformer':  # every layer counts as a stage
        grid = Grid()
        model.patch_embed.register_forward_hook(grid.note_output)
        return [((height, width), [(layer, grid)]) for layer in model.layers]
    stages = []
    for i, stage in enumerate(model.stages):
        blocks = []
        for block in stage.blocks:
            grid = Grid()
            block.register_forward_pre_hook(grid.note_input)
            blocks.append((block, grid))
        # patch merging rounds up
        stages.append(((-(-height // 2**i), -(-width // 2**i)), blocks))
    return stages


def _replace(block, grid, name, cfg, lepe, gate, class_token) -> None:
    """Put an operator in place of the attention of one block."""
    old = block.attn
    if hasattr(old, 'w_msa'):  # Swin
        inner, drop = old.w_msa, nn.Sequential(old.w_msa.proj_drop, old.drop)
        dropped = inner.attn_drop.p
    else:
        inner, drop = old, nn.Sequential(old.proj_drop, old.gamma1, old.out_drop)
        dropped = old.attn_drop
    if dropped:
        raise ValueError(
            f'operator {name!r} has no scores to drop, got attention dropout {dropped}; set it to 0'
        )
    heads = inner.num_heads
    operator = build_operator(name, heads, inner.qkv.in_features // heads, **cfg)
    operator.expect_extra_tokens(0 if class_token is None else class_token.shape[1])
    block.attn = TokenAttention(inner.qkv, operator, inner.proj, drop, grid, lepe, gate)
    if operator.local_ffn:
        hidden = block.ffn.layers[0]  # linear, activation, dropout
        conv = TokenConv(hidden[0].out_features, 3, grid)
        block.ffn.layers[0] = nn.Sequential(hidden[0], conv, *hidden[1:])
