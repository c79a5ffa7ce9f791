"""Studies of the runtime: what options change, whether drafters are right, widened models."""
