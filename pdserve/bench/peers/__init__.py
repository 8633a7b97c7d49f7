"""Other programs that store or move bytes, measured beside the pool in the same run."""
