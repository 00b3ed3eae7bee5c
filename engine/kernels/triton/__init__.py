"""The model's operations in Triton for NVIDIA devices; the oracle of each stands in `oracle.py`."""
