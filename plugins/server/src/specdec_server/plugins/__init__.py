"""Entry points. Nothing here imports anything heavy at module level."""
