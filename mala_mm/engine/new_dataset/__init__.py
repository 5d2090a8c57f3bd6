"""From a folder of images to a config that trains on it: ``tools/new_dataset.py``.

``sources`` reads what is there and splits it, ``recipes`` knows what can be trained, ``fitting``
derives numbers from the data, ``writing`` writes the config, ``command`` is the command line.
"""
