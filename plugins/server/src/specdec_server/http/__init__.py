"""HTTP without a model: errors, limits, keys, streams."""
