"""Complexity of models, and the model zoo."""

from .complexity import Complexity, Part, attention_macs, build_on_meta, count_complexity

__all__ = ['Complexity', 'Part', 'attention_macs', 'build_on_meta', 'count_complexity']
