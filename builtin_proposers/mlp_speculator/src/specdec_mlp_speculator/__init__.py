"""MLP speculator: a small recurrent network on the target's last hidden state and the tokens drafted so far."""

__version__ = "0.1.0"
