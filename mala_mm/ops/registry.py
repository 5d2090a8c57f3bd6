"""The registry of attention operators, and what every operator is.

An operator is one file in :mod:`mala_mm.ops.operators`: its equations in plain PyTorch, its paper,
its options, its cost. ``@register_operator(name)`` is all that makes it known: the backbones'
``attn_types``, the counts of :mod:`mala_mm.analysis`, the command lines, the tables of the docs and
the tests read :data:`OPERATORS`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite

import torch
from torch import Tensor, nn

OPERATORS: dict[str, type[Operator]] = {}
"""Every registered operator by its name, in alphabetical order of the files."""


def register_operator(name: str) -> Callable[[type[Operator]], type[Operator]]:
    """Class decorator that makes an operator known under a name.

    Args:
        name (str): The name, as ``attn_types`` and command lines take it.

    Raises:
        TypeError: If the class is no :class:`Operator`.
        ValueError: If another operator has the name.
    """

    def register(cls: type[Operator]) -> type[Operator]:
        if not (isinstance(cls, type) and issubclass(cls, Operator)):
            raise TypeError(f'operator {name!r} must be a subclass of Operator, got {cls!r}')
        known = OPERATORS.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(
                f'operator {name!r} is registered already, by {known.__module__}.'
                f'{known.__qualname__}; choose another name'
            )
        cls.name = name
        OPERATORS[name] = cls
        return cls

    return register


def get_operator(name: str) -> type[Operator]:
    """Return the class of an operator.

    Args:
        name (str): Its registered name.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in OPERATORS:
        raise ValueError(f'the operator must be one of {tuple(OPERATORS)}, got {name!r}')
    return OPERATORS[name]


def build_operator(name: str, num_heads: int, head_dim: int, **options) -> Operator:
    """Build an operator for one attention layer.

    Args:
        name (str): Its registered name.
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.
        **options: Options of the operator, see its class.

    Raises:
        ValueError: If the name or an option is unknown, or an option's value is not allowed.
    """
    cls = get_operator(name)
    known = cls.option_names()
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f'; did you mean {close[0]!r}?' if close else ''
            raise ValueError(
                f'operator {name!r} has no option {option!r}, its options are '
                f'{", ".join(known) or "none"}{hint}'
            )
    return cls(num_heads, head_dim, **options)


class Operator(nn.Module):
    """An attention operator over the tokens of a feature map.

    A subclass implements :meth:`equations` and :meth:`macs`, takes its options as keyword-only
    arguments of its constructor, and may own parameters and buffers.

    Args:
        num_heads (int): Number of heads.
        head_dim (int): Width ``d`` of a head.

    Attributes:
        name (str): The registered name.
        paper (str): Title, equation numbers and address of the paper.
        needs_input (bool): Whether :meth:`equations` also takes the input of the attention layer,
            as ``x`` of shape (B, heads * d, H, W).
        no_scores (str): Why the output is no weighted sum of the values with one weight per head,
            as the end of a sentence; empty if it is one, and :meth:`scores` gives the weights.
        local_ffn (bool): Whether the paper also puts a 3x3 depthwise convolution between the two
            layers of the block's feed-forward network, for a host without one to add.
        takes_extra_tokens (bool): Whether there may be tokens off the map, such as a class token.
        num_extra_tokens (int): Their number; they stand before those of the map.
    """

    name: str = ''
    paper: str = ''
    needs_input: bool = False
    no_scores: str = ''
    local_ffn: bool = False
    takes_extra_tokens: bool = False
    num_extra_tokens: int = 0

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        for key, value in (('num_heads', num_heads), ('head_dim', head_dim)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f'{key} must be a positive integer, got {value!r}')
        self.num_heads = num_heads
        self.head_dim = head_dim

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Return the names of the operator's options."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

    def expect_extra_tokens(self, number: int) -> Operator:
        """Take so many tokens off the map, such as a class token, before those of the map.

        Args:
            number (int): ``N = number + H * W`` from now on.

        Returns:
            Operator: The operator itself.

        Raises:
            ValueError: If the operator has no rule for them.
        """
        if number and not self.takes_extra_tokens:
            raise ValueError(
                f'operator {self.name!r} takes the tokens of a map alone, got {number} class token '
                'beside them; use a host without class token'
            )
        if number and getattr(self, 'rotary', False):
            raise ValueError(
                f'operator {self.name!r} turns tokens by their place on the map (rotary=True), and '
                'a class token has none; set rotary=False'
            )
        self.num_extra_tokens = number
        return self

    def equations(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the operator as its paper writes it, differentiable, in the type of its inputs.

        Args:
            q (Tensor): Queries of shape (B, heads, N, d), ``N = H * W`` tokens in row order.
            k (Tensor): Keys, as ``q``.
            v (Tensor): Values, as ``q``.
            size (tuple[int, int]): Height and width (H, W).

        Returns:
            Tensor: As ``q``.
        """
        raise NotImplementedError

    def macs(self, num_tokens: int) -> int:
        """Multiply-adds for one image, all heads.

        Matrix products and convolutions alone: activations, norms, sums and scalings are not
        counted, as in the field's "FLOPs".

        Args:
            num_tokens (int): Number of tokens ``N``.
        """
        raise NotImplementedError

    def scores(
        self,
        q: Tensor,
        k: Tensor,
        size: tuple[int, int],
        rows: Sequence[int] | Tensor,
        x: Tensor | None = None,
    ) -> Tensor:
        """Return rows of the attention scores, ``s_ij`` in ``y_i = sum_j s_ij v_j``.

        The N x N matrix is never built: with one channel of values per row that is asked for, a
        score is the gradient of one output with respect to one value, and a row of a linear
        operator costs O(N d), whatever its equations.

        Args:
            q (Tensor): Queries of shape (B, heads, N, d), any floating dtype.
            k (Tensor): Keys, as ``q``.
            size (tuple[int, int]): Height and width (H, W).
            rows (Sequence[int] | Tensor): The R queries, as indices of tokens, extra ones first.
            x (Tensor, optional): As in :meth:`forward`.

        Returns:
            Tensor: Shape (B, heads, R, N), without gradient; half types in float32.

        Raises:
            ValueError: If the inputs do not fit, there is no such token, or the operator has no
                scores.
        """
        if self.no_scores:
            having = tuple(name for name, cls in OPERATORS.items() if not cls.no_scores)
            raise ValueError(
                f'operator {self.name!r} has no scores: {self.no_scores}; operators with scores '
                f'are {having}'
            )
        check_inputs(q, k, k, size, self.num_extra_tokens)
        self.check_heads(q)
        rows = check_rows(rows, q)
        q, k = in_float32(q).detach(), in_float32(k).detach()
        extra = {'x': in_float32(x).detach()} if self.needs_input else {}
        with torch.enable_grad(), without_autocast(q.device):
            values = k.new_zeros(*k.shape[:3], len(rows), requires_grad=True)
            y = self.equations(q, k, values, size, **extra)  # (B, heads, N, R)
            picked = y[:, :, rows, torch.arange(len(rows), device=q.device)]
            return torch.autograd.grad(picked.sum(), values)[0].mT

    def state(self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int]) -> Tensor:
        """Return what all queries read: the d x d sum over keys and values, "KV buffer".

        Args:
            q (Tensor): Queries of shape (B, heads, N, d), which may weigh the keys.
            k (Tensor): Keys, as ``q``.
            v (Tensor): Values, as ``q``.
            size (tuple[int, int]): Height and width (H, W).

        Returns:
            Tensor: Shape (B, heads, d, d), dtype of ``q``.

        Raises:
            ValueError: If the operator has no such state.
        """
        having = tuple(name for name, cls in OPERATORS.items() if cls.state is not Operator.state)
        raise ValueError(f'operator {self.name!r} has no KV state; operators with one are {having}')

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], x: Tensor | None = None
    ) -> Tensor:
        """Attend. Half types are computed in float32, whatever autocast says.

        Args:
            q (Tensor): Queries of shape (B, heads, N, d), any floating dtype and strides.
            k (Tensor): Keys, same shape, dtype and device.
            v (Tensor): Values, same shape, dtype and device.
            size (tuple[int, int]): Height and width (H, W) of the feature map, ``H * W = N``.
            x (Tensor, optional): Input of the attention layer, (B, heads * d, H, W), for operators
                with ``needs_input``; (B, heads * d, N) where there are extra tokens.

        Returns:
            Tensor: Shape (B, heads, N, d), dtype of ``q``.

        Raises:
            TypeError: If an input is no floating-point tensor.
            ValueError: If the inputs do not fit each other or the operator.
        """
        check_inputs(q, k, v, size, self.num_extra_tokens)
        self.check_heads(q)
        extra = {}
        if self.needs_input:
            if x is None:
                raise ValueError(f'operator {self.name!r} needs the input x of the layer')
            extra['x'] = in_float32(x)
        with without_autocast(q.device):
            y = self.equations(in_float32(q), in_float32(k), in_float32(v), size, **extra)
        return y.to(q.dtype)

    def check_heads(self, q: Tensor) -> None:
        """Refuse inputs with other heads than the operator was built for.

        Raises:
            ValueError: If their number or width differs.
        """
        if q.shape[1] != self.num_heads or q.shape[3] != self.head_dim:
            raise ValueError(
                f'operator {self.name!r} was built for {self.num_heads} heads of width '
                f'{self.head_dim}, got inputs of shape {tuple(q.shape)}'
            )

    def gated(
        self, qkvo: Tensor, lepe: Tensor | Callable[[Tensor], Tensor], x: Tensor | None = None
    ) -> Tensor:
        """Attend between two 1x1 convolutions: ``(attention(q, k, v) + lepe) * o``.

        Args:
            qkvo (Tensor): Projection of shape (B, 4C, H, W), channels in the order q, k, v, o. A
                head is a group of ``d`` consecutive channels.
            lepe (Tensor | Callable): Local position of shape (B, C, H, W), or the function that
                computes it from v of that shape.
            x (Tensor, optional): Input of the attention layer, (B, C, H, W), for operators with
                ``needs_input``.

        Returns:
            Tensor: Shape (B, C, H, W), dtype and memory format of ``qkvo``.
        """
        q, k, v, o = qkvo.chunk(4, dim=1)
        size = tuple(qkvo.shape[2:])
        y = self(*(split_heads(part, self.num_heads) for part in (q, k, v)), size, x)
        y = merge_heads(y, size, token_major=qkvo.stride(1) == 1)
        return (y + (lepe(v) if callable(lepe) else lepe)) * o

    def extra_repr(self) -> str:
        """Heads and options, for ``print``."""
        options = {key: getattr(self, key) for key in self.option_names() if hasattr(self, key)}
        listed = dict(num_heads=self.num_heads, head_dim=self.head_dim, **options)
        return ', '.join(f'{key}={value!r}' for key, value in listed.items())


# What operators share.


def check_options(scale: float | None = None, eps: float = 0.0, **flags: bool) -> None:
    """Refuse options that no operator can compute with.

    Raises:
        ValueError: If one has a value that is not allowed.
    """
    if scale is not None and not (_is_number(scale) and scale > 0):
        raise ValueError(f'scale must be a positive number or None, got {scale!r}')
    if not (_is_number(eps) and eps >= 0):
        raise ValueError(f'eps must be a number from 0 on, got {eps!r}')
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f'{name} must be True or False, got {flag!r}')


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, size: tuple[int, int], num_extra_tokens: int = 0
) -> None:
    """Refuse queries, keys and values that do not fit each other.

    Raises:
        TypeError: If one is no floating-point tensor.
        ValueError: If shapes, dtypes or devices differ, ``H * W != N`` or ``d % 4 != 0``.
    """
    for name, x in (('q', q), ('k', k), ('v', v)):
        if not isinstance(x, Tensor):
            raise TypeError(f'{name} must be a Tensor, got {type(x).__name__}')
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            'q, k and v must share one shape (B, heads, N, d), got '
            f'{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}'
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f'q, k and v must lie on one device, got {q.device}, {k.device} and {v.device}'
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f'q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}')
    if not q.dtype.is_floating_point:
        raise TypeError(f'q, k and v must be floating point, got {q.dtype}')
    height, width = size
    if q.shape[2] != num_extra_tokens + height * width:
        beside = f' besides {num_extra_tokens} extra' if num_extra_tokens else ''
        raise ValueError(
            f'size (H, W) must have H * W = N{beside}, got size {(height, width)} for '
            f'N = {q.shape[2]}'
        )
    if q.shape[3] % 4:
        raise ValueError(f'the head width d must be divisible by 4, got {q.shape[3]}')


def check_rows(rows: Sequence[int] | Tensor, q: Tensor) -> Tensor:
    """Return indices of tokens as a tensor on the device of q (B, heads, N, d).

    Raises:
        ValueError: If there is none, or one is no token.
    """
    rows = torch.as_tensor(rows, device=q.device)
    num_tokens = q.shape[2]
    if rows.dim() != 1 or rows.dtype != torch.int64 or len(rows) == 0:
        raise ValueError(f'rows must be a list of integers, at least one, got {rows.tolist()}')
    if not 0 <= rows.min() <= rows.max() < num_tokens:
        raise ValueError(f'rows must be from 0 to {num_tokens - 1}, got {rows.tolist()}')
    return rows


def feature_map(x: Tensor) -> Tensor:
    """``phi(x) = elu(x) + 1``, positive everywhere."""
    return torch.nn.functional.elu(x) + 1


def in_float32(x: Tensor) -> Tensor:
    """Half types as float32, in which sums over many tokens are held; others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Turn autocast off; devices without it, such as meta, have none to turn off."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def depthwise(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """``conv(x)`` in the type of ``x``, whatever type its parameters are kept in."""
    bias = None if conv.bias is None else conv.bias.to(x.dtype)
    return torch.nn.functional.conv2d(
        x, conv.weight.to(x.dtype), bias, padding=conv.padding, groups=conv.groups
    )


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """View a map (B, C, H, W) as (B, heads, N, d); copy where the strides of H and W forbid it."""
    return x.flatten(2).unflatten(1, (num_heads, -1)).transpose(2, 3)


def merge_heads(x: Tensor, size: tuple[int, int], token_major: bool) -> Tensor:
    """Tokens (B, heads, N, d) as a map (B, C, H, W), in channels_last memory if ``token_major``."""
    if token_major:
        return x.transpose(1, 2).flatten(2).unflatten(1, size).permute(0, 3, 1, 2)
    return x.transpose(2, 3).flatten(1, 2).unflatten(2, size)
