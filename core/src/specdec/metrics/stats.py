"""`SpecDecodingStats`: what happened in one step, and the sum since the engine started."""
