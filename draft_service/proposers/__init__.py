"""What makes blocks."""
