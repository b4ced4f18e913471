"""The fold of a stream: one loop over arrivals, whoever asks for it."""
