"""Complexity of models, the model zoo, and what looks inside of models."""

from .complexity import Complexity, Part, attention_macs, build_on_meta, count_complexity

__all__ = ['Complexity', 'Part', 'attention_macs', 'build_on_meta', 'count_complexity']
