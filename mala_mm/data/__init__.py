"""Checks of data sets, and the data sets that the libraries lack."""
