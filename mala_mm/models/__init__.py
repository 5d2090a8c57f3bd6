"""Backbones, their layers and heads. They need mmengine and mmcv, of which mmcv-lite is enough."""

try:
    from .backbones import ARCHS, FAMILIES, RAVLT, MAViT
    from .heads import ProjectionNeck
    from .hosts import replace_attention
except ModuleNotFoundError as error:
    package = (error.name or '').split('.')[0]
    if package not in ('mmcv', 'mmengine'):
        raise
    raise ModuleNotFoundError(
        f'The backbones need {package}, which is not installed; run '
        'python -m pip install mmengine mmcv-lite',
        name=error.name,
    ) from None

__all__ = ['ARCHS', 'FAMILIES', 'MAViT', 'ProjectionNeck', 'RAVLT', 'replace_attention']
