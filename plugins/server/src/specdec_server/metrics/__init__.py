"""Prometheus metrics, and reading them back."""
