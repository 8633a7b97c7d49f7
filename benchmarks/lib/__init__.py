"""What several benchmarks share: loads, their client and figures, clusters that are started, printing."""
