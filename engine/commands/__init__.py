"""Commands of `python -m engine` that start an engine; the others live beside what they run."""
