"""One module for each kind of head that can be trained."""
