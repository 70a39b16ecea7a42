"""Pallas kernels for TPUs (Mosaic TPU)."""
