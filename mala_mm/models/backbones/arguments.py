"""Checks of what a backbone is built from: each refusal is one sentence."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from mala_mm.ops import OPERATORS

NORM_TYPES = ('BN', 'BN2d', 'SyncBN', 'MMSyncBN', 'IN', 'LN', 'GN')


def is_integer(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether a value is an integer (no bool) within bounds."""
    return isinstance(value, numbers.Integral) and type(value) is not bool and low <= value <= high


def is_number(value: Any) -> bool:
    """Whether a value is a finite number (no bool)."""
    return (
        isinstance(value, numbers.Real) and type(value) is not bool and math.isfinite(float(value))
    )


def require(valid: bool, name: str, wanted: str, value: Any) -> None:
    """Raise a ValueError that names an argument, what it must be and what it is."""
    if not valid:
        raise ValueError(f'{name} must be {wanted}, got {value!r}')


def parse_arch(arch: str | dict, zoo: Mapping[str, dict]) -> dict:
    """Return the entries of an arch, by name or given, with the defaults filled in.

    Raises:
        TypeError: If ``arch`` is neither a name nor a dict.
        ValueError: If the name is unknown or an entry is wrong.
    """
    if isinstance(arch, str):
        if arch not in zoo:
            raise ValueError(f'arch must be one of {sorted(zoo)}, got {arch!r}')
        arch = zoo[arch]
    elif not isinstance(arch, dict):
        raise TypeError(f'arch must be a name or a dict, got {type(arch).__name__}')
    required = {'embed_dims', 'depths', 'num_heads'}
    known = required | {'mlp_ratio', 'drop_path_rate', 'layer_scale_init_values'}
    if not required <= set(arch) <= known:
        raise ValueError(
            f'an arch dict needs {sorted(required)} and may have {sorted(known - required)}, '
            f'got {sorted(arch)}'
        )
    for key in ('embed_dims', 'depths', 'num_heads'):
        require(
            _positive(arch[key]), f'arch[{key!r}]', 'a sequence of positive integers', arch[key]
        )
    num_stages = len(arch['depths'])
    arch = {
        'mlp_ratio': 3.5,
        'drop_path_rate': 0.0,
        'layer_scale_init_values': (1.0,) * num_stages,
        **arch,
    }
    scales = arch['layer_scale_init_values']
    numeric = isinstance(scales, Sequence) and all(map(is_number, scales))
    require(numeric, "arch['layer_scale_init_values']", 'a sequence of numbers', scales)
    for key in ('embed_dims', 'num_heads', 'layer_scale_init_values'):
        if len(arch[key]) != num_stages:
            raise ValueError(
                f'arch[{key!r}] must have {num_stages} entries, one per entry of depths '
                f'{tuple(arch["depths"])}, got {tuple(arch[key])}'
            )
    ratio = arch['mlp_ratio']
    wide = is_number(ratio) and ratio * min(arch['embed_dims']) >= 1
    require(wide, "arch['mlp_ratio']", 'a positive number', ratio)
    check_rate(arch['drop_path_rate'], "arch['drop_path_rate']")
    return arch


def _positive(values: Any) -> bool:
    return (
        isinstance(values, Sequence)
        and len(values) > 0
        and all(is_integer(value, 1) for value in values)
    )


def parse_attn_types(
    attn_types: Sequence[str] | None, defaults: Sequence[str], num_stages: int
) -> tuple[str, ...]:
    """Return the operator of each stage.

    Raises:
        ValueError: If they are not one known operator per stage.
    """
    if attn_types is None:
        # A pyramid of another height keeps softmax attention in its last two stages.
        linear, softmax = defaults[0], defaults[-1]
        attn_types = (linear,) * (num_stages - 2) + (softmax,) * min(2, num_stages)
    if (
        not isinstance(attn_types, Sequence)
        or isinstance(attn_types, str)
        or len(attn_types) != num_stages
        or any(name not in tuple(OPERATORS) for name in attn_types)
    ):
        raise ValueError(
            f'attn_types must name {num_stages} operators, one per stage, each one of '
            f'{tuple(OPERATORS)}, got {attn_types!r}'
        )
    return tuple(attn_types)


def parse_out_indices(out_indices: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return the stages whose maps are returned.

    Raises:
        ValueError: If they are not stages in rising order.
    """
    valid = (
        isinstance(out_indices, Sequence)
        and len(out_indices) > 0
        and all(is_integer(i, 0, num_stages - 1) for i in out_indices)
        and list(out_indices) == sorted(set(out_indices))
    )
    wanted = f'a sequence of stages, each once and in order, from 0 to {num_stages - 1}'
    require(valid, 'out_indices', wanted, out_indices)
    return tuple(out_indices)


def parse_attn_cfg(attn_cfg: dict | Sequence[dict] | None, attn_types: Sequence[str]) -> list[dict]:
    """Return the options of each stage's operator.

    Raises:
        ValueError: If an option is one of no operator here, or there is not one dict per stage.
    """
    if isinstance(attn_cfg, Mapping) or attn_cfg is None:
        shared = dict(attn_cfg or {})
        known = [OPERATORS[name].option_names() for name in attn_types]
        everything = sorted({option for options in known for option in options})
        for option in shared:
            if option not in everything:
                close = difflib.get_close_matches(str(option), everything, n=1, cutoff=0.4)
                raise ValueError(
                    f'attn_cfg has the option {option!r}, which none of the operators '
                    f'{attn_types} has; theirs are {everything}'
                    + (f', did you mean {close[0]}?' if close else '')
                )
        return [{o: shared[o] for o in options if o in shared} for options in known]
    if (
        not isinstance(attn_cfg, Sequence)
        or len(attn_cfg) != len(attn_types)
        or not all(isinstance(cfg, Mapping) for cfg in attn_cfg)
    ):
        raise ValueError(
            f'attn_cfg must be a dict, or {len(attn_types)} dicts, one per stage, got {attn_cfg!r}'
        )
    return [dict(cfg) for cfg in attn_cfg]


def check_norm_cfg(norm_cfg: dict) -> None:
    """Refuse what mmcv cannot build a norm of a map's channels from.

    Raises:
        ValueError: If the type is not registered.
    """
    from mmengine.registry import MODELS

    valid = isinstance(norm_cfg, Mapping) and 'type' in norm_cfg
    require(valid, 'norm_cfg', "a dict such as dict(type='BN')", norm_cfg)
    kind = norm_cfg['type']
    with MODELS.switch_scope_and_registry(None) as registry:  # as mmcv looks it up
        known = not isinstance(kind, str) or registry.get(kind) is not None
    if not known:
        close = difflib.get_close_matches(kind, NORM_TYPES, n=1, cutoff=0.3) or ['BN']
        raise ValueError(f'norm_cfg.type is {kind!r}; did you mean {close[0]!r}?')


def check_rate(rate: Any, name: str = 'drop_path_rate') -> None:
    """Refuse what is no probability below 1.

    Raises:
        ValueError: If it is none.
    """
    require(is_number(rate) and 0 <= rate < 1, name, 'a number from 0 to below 1', rate)
