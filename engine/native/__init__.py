"""C11 sources built by the package, and their thin Python faces."""
