"""The engine: requests, scheduler, KV-cache blocks and the step loop."""
