"""HTTP: routes, bodies, event streams, error shapes."""
