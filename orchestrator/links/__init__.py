"""Connections to workers: one object per worker, which connects, checks the pair, watches and reconnects by itself."""
