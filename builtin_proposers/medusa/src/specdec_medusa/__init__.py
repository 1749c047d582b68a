"""Medusa: heads on the target's last hidden state, one for each of the next tokens."""

__version__ = "0.1.0"
