"""Fused linear attention: the ``torch.library`` ops (:mod:`.library`) and their backends."""
