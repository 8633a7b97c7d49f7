"""Load on a server of OpenAI's API, and what it took: first-token time, throughput, cached tokens."""
