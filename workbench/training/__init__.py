"""Training the drafters on the target's own text: features once, then four objectives over one loop."""
