"""The parts of `minisgl bench serve`: workloads, a client that keeps times, the load, and what is made of it."""
