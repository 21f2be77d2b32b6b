"""What the services share. Imports none of them."""

__version__ = "0.1.0"
