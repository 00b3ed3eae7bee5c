"""Pages and pools: who holds what, and the tensors behind it."""
