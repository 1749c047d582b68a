"""EAGLE heads of Mistral Large 3: multi-head latent attention in the native Mistral format."""

__version__ = "0.1.0"
