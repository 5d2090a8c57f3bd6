"""What mmengine is told, and what files may name."""

from mala_mm.compat import safe_globals

ALLOWED = {
    'argparse.Namespace',
    'builtins.getattr',  # that of HistoryBuffer's methods alone
    'mmengine.logging.history_buffer.HistoryBuffer',
    'numpy.dtype',
    'numpy.ndarray',
    *(
        f'numpy.dtypes.{name}DType'
        for name in (
            *('Bool', 'Float16', 'Float32', 'Float64'),
            *('Int8', 'Int16', 'Int32', 'Int64', 'LongLong'),
            *('UInt8', 'UInt16', 'UInt32', 'UInt64', 'ULongLong'),
        )
    ),
    *(
        f'numpy.{core}.multiarray.{name}'
        for core in ('core', '_core')
        for name in ('_reconstruct', 'scalar')
    ),
}


def test_files_may_name_plain_values_and_nothing_else():
    """Whatever is added here runs when a stranger's file is read."""
    names = [
        entry[1] if isinstance(entry, tuple) else f'{entry.__module__}.{entry.__qualname__}'
        for entry in safe_globals()
    ]
    assert sorted(names) == sorted(ALLOWED)
    by_name = dict(zip(names, safe_globals()))
    getattr_, _ = by_name['builtins.getattr']
    assert getattr_ is not getattr
