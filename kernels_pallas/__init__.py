"""Pallas kernels for the inner work of csympow, by chip; the functions in `csympow.forms` are their plain twins."""
