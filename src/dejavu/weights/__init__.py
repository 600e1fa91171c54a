"""Reading, identifying, quantising and safely writing model weights."""
