"""Distillation: a small draft for any target, taught by the target's own laws."""
