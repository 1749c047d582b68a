"""EAGLE and EAGLE-3 heads with multi-head latent attention."""

__version__ = "0.1.0"
