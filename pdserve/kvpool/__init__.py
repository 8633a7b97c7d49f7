"""KV page pool: distributed, shared-memory first."""
