"""The draft service: proposes blocks of candidate tokens."""
