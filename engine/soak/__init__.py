"""`python -m engine soak`: mixed traffic on a real server, what must hold meanwhile, and the report."""
