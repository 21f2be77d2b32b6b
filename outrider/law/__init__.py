"""The only place where logits become probabilities and probabilities become tokens."""
