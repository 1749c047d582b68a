"""The load generator behind specdec bench serve."""
