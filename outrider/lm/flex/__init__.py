"""Attention that reads pages where they lie: torch's FlexAttention over tables of pages, for CUDA.

Nothing outside imports it unless it is asked for: a worker on a CPU never loads it.
"""
