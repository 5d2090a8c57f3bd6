"""The tail of the classifiers."""

from .projection import ProjectionNeck

__all__ = ['ProjectionNeck']
