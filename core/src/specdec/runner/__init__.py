"""The stages of a step around the model: batch, verification, commit, drafting."""
