"""The target service: scores blocks with the large model."""
