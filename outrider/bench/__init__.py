"""Measuring: speculative, plain and other ways of decoding, side by side in one run.

A *way* answers prompts, a *cell* is one prompt set at one concurrency answered one way, a *run* one repetition of
it.
"""
