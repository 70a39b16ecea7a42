"""Kernels for NVIDIA Hopper, in Pallas Mosaic GPU."""
