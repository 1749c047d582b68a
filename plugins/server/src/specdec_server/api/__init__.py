"""What clients send, and what they are answered."""
