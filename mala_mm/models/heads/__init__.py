from .projection import ProjectionNeck

__all__ = ['ProjectionNeck']
