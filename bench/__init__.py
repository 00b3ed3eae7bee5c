"""Benchmarks: what `python -m engine bench NAME` runs."""
