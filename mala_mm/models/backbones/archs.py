"""The four published sizes. All that depends on them takes them from here, through the models."""

ARCHS: dict[str, dict] = dict(
    tiny=dict(
        embed_dims=(64, 128, 256, 512),
        depths=(2, 2, 6, 2),
        num_heads=(1, 2, 4, 8),
        drop_path_rate=0.1,
    ),
    small=dict(
        embed_dims=(64, 128, 320, 512),
        depths=(3, 5, 9, 3),
        num_heads=(1, 2, 5, 8),
        drop_path_rate=0.15,
    ),
    base=dict(
        embed_dims=(96, 192, 384, 512),
        depths=(4, 6, 12, 6),
        num_heads=(1, 2, 6, 8),
        drop_path_rate=0.4,
        layer_scale_init_values=(1.0, 1.0, 1e-6, 1e-6),
    ),
    large=dict(
        embed_dims=(96, 192, 448, 640),
        depths=(4, 7, 19, 8),
        num_heads=(1, 2, 7, 10),
        drop_path_rate=0.55,
        layer_scale_init_values=(1e-6, 1e-6, 1e-6, 1e-6),
    ),
)
"""Per size the widths, depths and heads of the stages, and the rates of the published trainings."""
