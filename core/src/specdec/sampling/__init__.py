"""From the target's logits to tokens and text: parameters, logits pipeline, sampler, log-probabilities, stops."""
