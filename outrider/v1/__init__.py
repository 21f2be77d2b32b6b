"""Generated from protos/outrider/v1 by protos/generate.py."""
