"""Token Recycling: drafts follow what the target found likeliest behind each token."""

__version__ = "0.1.0"
