"""Forward batches, their execution, sampling and commits."""
