"""Kernels; each has its plain-torch oracle."""
